"""The app's migrations: one for each revision of the library."""

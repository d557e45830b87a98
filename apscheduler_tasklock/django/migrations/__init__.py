"""One migration for each revision of the library's own."""

"""What `make dist` builds is checked and tried as a user gets it."""

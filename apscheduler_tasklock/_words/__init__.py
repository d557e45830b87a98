"""What tasks, runs and stories are in words: the same for the command line and for pages."""

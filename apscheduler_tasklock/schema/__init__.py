"""The task lock table: what it is, how it is made, and the check of it."""

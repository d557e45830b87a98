"""Connections, their time limits and their errors. Knows nothing of locks."""

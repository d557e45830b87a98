"""Connections, their time limits and their errors. This package knows nothing of locks."""

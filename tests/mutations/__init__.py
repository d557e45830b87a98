"""Mistakes that are made in the package on purpose, each of which a test has to find."""

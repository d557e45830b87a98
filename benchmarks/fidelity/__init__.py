"""Thousands of windows of simulated time: who runs a window twice, and who loses one."""

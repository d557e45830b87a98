"""Thousands of windows of simulated time: which rule runs a window twice, or loses one."""

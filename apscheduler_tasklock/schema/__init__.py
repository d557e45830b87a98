"""The tables of the task lock: their definition, their migrations, and the check at the start."""

"""The life of a run, from when it is due until its worker is free again."""

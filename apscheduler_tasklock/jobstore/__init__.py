"""The job store that all replicas share: its rows, the reads of due jobs, and their run times."""

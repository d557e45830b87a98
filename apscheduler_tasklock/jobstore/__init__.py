"""The job store that all replicas share: what its rows hold, who hands them out, and when."""

"""The runs of jobs, each from its run time until its worker is free again."""

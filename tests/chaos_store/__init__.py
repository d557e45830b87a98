"""Random faults on replicas that share a job store: ``make chaos-store``."""

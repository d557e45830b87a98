"""Real replicas on a database that fails over: ``make chaos-ha``."""

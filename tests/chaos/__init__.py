"""Replicas under random faults, and a checker that reads what they did: ``make chaos``."""

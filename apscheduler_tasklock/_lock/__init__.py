"""Claims, renewals, releases and the clock. This package knows nothing of APScheduler."""

"""Who runs a window: claims, releases, renewals and the clock. Knows nothing of APScheduler."""

"""The APScheduler side: what a run time goes through on one replica."""

"""``apscheduler-tasklock demo``: three replicas, three jobs, one PostgreSQL, and what they did."""

"""The dashboard: an operator's view of all tasks in a browser, and what operators can do there."""

from __future__ import annotations

from apscheduler_tasklock.dashboard.access import Access, Authorize
from apscheduler_tasklock.dashboard.app import dashboard

__all__ = ["Access", "Authorize", "dashboard"]

"""``python -m apscheduler_tasklock``: the command ``apscheduler-tasklock``."""

import sys

from apscheduler_tasklock.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""The APScheduler side: what a run time goes through on one replica."""

import time

# When this process began to load it, on the monotonic clock. First of all: what it imports takes
# the most of that time.
LOADING_SINCE = time.monotonic()

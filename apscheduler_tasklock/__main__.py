"""The command ``apscheduler-tasklock``, and ``python -m apscheduler_tasklock``."""

import sys


def main() -> int:
    """Run the command line and return its exit status, also where psycopg finds no libpq."""
    try:
        from apscheduler_tasklock.cli import main as run
    except ImportError as error:
        if "no pq wrapper" not in str(error):
            raise
        sys.stderr.write(
            "apscheduler-tasklock: psycopg finds no libpq; install the system's, or psycopg with "
            "its own: pip install 'psycopg[binary]'\n"
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())

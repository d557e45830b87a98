"""What a stop waits for is said while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from apscheduler_tasklock._values import logger_of

logger = logger_of(__name__)

# Limits how long a stop waits for a log line that is being written.
LAST_LINE_TIMEOUT = 1.0


@contextmanager
def saying(say: Callable[[], None], interval: float) -> Iterator[None]:
    """Call ``say`` every ``interval`` seconds while the block goes on.

    A thread of its own does, because a scheduler that shuts down holds its locks meanwhile, and
    every other thread of the library may be waiting for one of them.
    """
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(interval):
            try:
                say()
            except Exception:  # nothing may end this thread unseen
                logger.exception("Could not say which jobs the stop waits for")

    thread = threading.Thread(target=work, name="tasklock-stop", daemon=True)
    with suppress(RuntimeError):  # no thread starts while the interpreter ends
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join(LAST_LINE_TIMEOUT)

"""Ctrl-C in the main thread, where the tests run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Let SIGINT raise ``KeyboardInterrupt``; a shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    """Interrupt the main thread."""
    os.kill(os.getpid(), signal.SIGINT)

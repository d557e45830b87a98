"""How values are shown that somebody else may have written: cut, in every message and log line.

Whoever can write a table's rows chooses names, arguments and errors of any length. None of them
gets into a message whole, so that no row can fill a disk with log lines.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress

from apscheduler_tasklock._application import may_log_here

# The most characters of a job's id, its function's or executor's name; and the most bytes of a
# task's name, which is a primary key: PostgreSQL refuses index entries of over 2,700 bytes.
LONGEST_NAME = 1000
# The most characters that are shown of one value within a message.
LONGEST_VALUE = 300
# The most characters of a message about one row, and of one value of a log line. The longest of our
# own have the statements that grant all rights.
LONGEST_MESSAGE = 4000
# The most characters of a log line's message, and of its traceback.
_LONGEST_LINE = 16000


def cut(text: object, longest: int = LONGEST_MESSAGE) -> str:
    """Return a text of at most so many characters, and how many there are if that is more.

    :param text: also an error, whose message is meant
    :param longest: the most characters that are left
    """
    text = str(text)
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text)} characters)"


def shown(value: object) -> str:
    """Return the ``repr`` of a value for a message, cut."""
    if isinstance(value, str) and len(value) > LONGEST_VALUE:  # the repr of 1 MB need not be made
        return f"{value[:LONGEST_VALUE]!r}... ({len(value)} characters)"
    return cut(repr(value), LONGEST_VALUE)


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a module.

    Its log lines are cut, each value by itself. No handler runs in the database's thread.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_cut_line)
    logger.addFilter(may_log_here)
    return logger


def _cut_line(record: logging.LogRecord) -> bool:
    """Cut what a log line tells. Arguments that are short stay what they are, for handlers."""
    with suppress(Exception):  # of a trigger's own __str__; the handler tells of it
        if isinstance(record.args, tuple):
            record.args = tuple(map(_cut_argument, record.args))
        message = record.getMessage()
        if len(message) > _LONGEST_LINE:  # of many values
            record.msg, record.args = cut(message, _LONGEST_LINE), ()
        if record.exc_info and record.exc_info[1] is not None:
            told = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if len(told) > _LONGEST_LINE:  # as a formatter would write it
                record.exc_text = cut(told, _LONGEST_LINE)
    return True


def _cut_argument(value: object) -> object:
    if isinstance(value, (str, BaseException)) and len(str(value)) > LONGEST_MESSAGE:
        return cut(value)
    return value

"""Values in messages and log lines: a long value is cut.

The names, arguments and errors in a table's rows may have any length. Messages have such values in
a cut form, so that no row can fill a disk with log lines.
"""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress

from apscheduler_tasklock._application import may_log_here

# Limits the characters of a job's id, and of its function's and executor's names. Also limits the
# bytes of a task's name, because it is a primary key, and PostgreSQL rejects index entries of over
# 2,700 bytes.
LONGEST_NAME = 1000
# Limits the characters of one value within a message.
LONGEST_VALUE = 300
# Limits the characters of a message about one row, and of one value of a log line. The limit leaves
# room for the library's longest messages, which have the statements that grant all rights.
LONGEST_MESSAGE = 4000
# Limits the characters of a log line's message, and of its traceback.
_LONGEST_LINE = 16000


def cut(text: object, longest: int = LONGEST_MESSAGE) -> str:
    """Return a text, cut to so many characters; a cut text ends with its length.

    :param text: a text, or an error, whose message is cut
    :param longest: limits the characters that are left
    """
    text = str(text)
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text)} characters)"


def shown(value: object) -> str:
    """Return the ``repr`` of a value for a message, cut."""
    if isinstance(value, str) and len(value) > LONGEST_VALUE:  # make no repr of the whole text
        return f"{value[:LONGEST_VALUE]!r}... ({len(value)} characters)"
    return cut(repr(value), LONGEST_VALUE)


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a module.

    The logger cuts each long value of a log line. In a thread that keeps application code out, such
    as the replica's thread, its records go to the application's thread.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_cut_line)
    logger.addFilter(may_log_here)
    return logger


def _cut_line(record: logging.LogRecord) -> bool:
    """Cut the long values of a log record, and keep the record.

    Short arguments stay objects and do not become texts, because handlers may use the objects.
    """
    with suppress(Exception):  # a value's own __str__ may fail, and the handler reports that
        if isinstance(record.args, tuple):
            record.args = tuple(map(_cut_argument, record.args))
        message = record.getMessage()
        if len(message) > _LONGEST_LINE:  # it has many values
            record.msg, record.args = cut(message, _LONGEST_LINE), ()
        if record.exc_info and record.exc_info[1] is not None:
            text = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n")
            if len(text) > _LONGEST_LINE:
                # Formatters use this text in place of their own.
                record.exc_text = cut(text, _LONGEST_LINE)
    return True


def _cut_argument(value: object) -> object:
    if isinstance(value, (str, BaseException)) and len(str(value)) > LONGEST_MESSAGE:
        return cut(value)
    return value

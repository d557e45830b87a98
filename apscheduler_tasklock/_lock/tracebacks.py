"""Tracebacks for the run history: frames and types, without source lines and local variables."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import TracebackType

# Limits the characters of a traceback in the run history.
LONGEST_TRACEBACK = 4_000
# Limits the frames of each exception; the last ones are kept.
MOST_FRAMES = 20
# Limits the exceptions of one traceback, because a chain or a group may have any number.
MOST_EXCEPTIONS = 20

_CAUSE = "The exception above was the direct cause of this one:"
_CONTEXT = "This one was raised while the exception above was handled:"
_NO_FRAMES = "  (its frames are not known)"
_LEFT_OUT = "(the beginning is left out)"
_PACKAGE = "apscheduler_tasklock."


@dataclass(frozen=True)
class Section:
    """The part of a traceback that tells of one exception. It can be pickled.

    :ivar head: how the exception is related to the one above; ``""``: it is the first one
    :ivar kind: the exception's class
    :ivar frames: its frames, one line each
    :ivar is_raised: whether the job raised it; ``False``: it belongs to the chain or a group
    """

    head: str
    kind: str
    frames: tuple[str, ...]
    is_raised: bool


def class_of(exception: BaseException) -> str:
    """Return the name of an exception's class, with its module unless that is ``builtins``."""
    kind = type(exception)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def sections_of(exception: BaseException) -> tuple[Section, ...]:
    """Return the sections of an exception, its chain and its group.

    A worker process calls this function, because an exception loses its frames when it is pickled.
    """
    return tuple(section for section, _ in _sections(exception, "", set()))


def traceback_of(
    exception: BaseException,
    message_of: Callable[[BaseException], str | None],
    in_worker: Sequence[Section] = (),
) -> str:
    """Return the traceback of an exception, in the order in which Python prints one.

    :param message_of: returns what may be stored of an exception's message; ``None``: nothing
    :param in_worker: the sections that a worker process has made; the messages of the chain are
        not known in this process
    """
    told = [
        (section, message_of(each) if each is not None else None)
        for section, each in _with_exceptions(exception, in_worker)
    ]
    text = "\n\n".join(_in_words(section, message) for section, message in told)
    if len(text) <= LONGEST_TRACEBACK:
        return text
    kept = text[len(_LEFT_OUT) + 1 - LONGEST_TRACEBACK :]
    # A part of a line would mislead, so the text begins with a whole line.
    return f"{_LEFT_OUT}\n{kept.partition(chr(10))[2] or kept}"


def _with_exceptions(
    exception: BaseException, in_worker: Sequence[Section]
) -> list[tuple[Section, BaseException | None]]:
    if not in_worker:
        return list(_sections(exception, "", set()))
    return [(each, exception if each.is_raised else None) for each in in_worker]


def _sections(
    exception: BaseException, head: str, seen: set[int]
) -> Iterator[tuple[Section, BaseException]]:
    """Yield the sections of an exception: first what it follows, then itself, then its group."""
    if id(exception) in seen or len(seen) >= MOST_EXCEPTIONS:
        return
    is_raised = not seen
    seen.add(id(exception))
    earlier, link = exception.__cause__, _CAUSE
    if earlier is None and not exception.__suppress_context__:
        earlier, link = exception.__context__, _CONTEXT
    if earlier is not None and not _is_text(earlier):
        before = list(_sections(earlier, head, seen))
        yield from before
        head = link if before else head
    frames = _frames(exception.__traceback__)
    yield Section(head, class_of(exception), frames, is_raised), exception
    # The attribute is looked up by its name, because Python 3.10 has no class of groups.
    members = getattr(exception, "exceptions", None)
    for number, member in enumerate(members if isinstance(members, tuple) else (), 1):
        if isinstance(member, BaseException):
            yield from _sections(member, f"Exception {number} of the group above:", seen)


def _is_text(exception: BaseException) -> bool:
    """Return whether an exception only has the text of a worker's traceback, with its messages."""
    return type(exception).__name__ in ("_RemoteTraceback", "RemoteTraceback")


def _frames(traceback: TracebackType | None) -> tuple[str, ...]:
    """Return the last frames, without those of this library that called the job."""
    frames: deque[str] = deque(maxlen=MOST_FRAMES)
    own: deque[str] = deque(maxlen=MOST_FRAMES)
    for frame, line in walk_tb(traceback):
        code = frame.f_code
        told = f'  File "{code.co_filename}", line {line}, in {code.co_name}'
        is_own = str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)
        (own if is_own and not frames else frames).append(told)
    return tuple(frames or own)


def _in_words(section: Section, message: str | None) -> str:
    raised = f"{section.kind}: {message}" if message else section.kind
    lines = [*(section.frames or (_NO_FRAMES,)), raised]
    return "\n".join([section.head, "", *lines] if section.head else lines)

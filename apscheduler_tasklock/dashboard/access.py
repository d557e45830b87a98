"""Access to the dashboard: who may read and operate, and which requests come from its pages."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request

from apscheduler_tasklock.errors import TaskLockOptionError

# Pages must not run code, load files or send forms anywhere but here. A frame around a page could
# trick an operator into a click.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """What a request may do.

    :ivar right: ``"read"``: see the pages; ``"operate"``: also pause, resume, run, free and
        acknowledge tasks, change stored jobs, and see the values of their arguments
    :ivar by: the operator's name, which others see beside what was done; ``None``: this process's
        user and host
    """

    right: Literal["read", "operate"]
    by: str | None = None

    def __post_init__(self) -> None:
        """Check the right, because a misspelt one must not be taken for the right to read.

        :raises TaskLockOptionError: there is no such right, or the database can have no such name
        """
        if self.right not in ("read", "operate"):
            raise TaskLockOptionError(
                f"Access: the right must be 'read' or 'operate', not {self.right!r}"
            )
        if self.by is not None and not _is_storable(self.by):
            raise TaskLockOptionError(
                f"Access: by must be a text without NUL and lone surrogates, not {self.by!r:.200}"
            )

    @property
    def may_operate(self) -> bool:
        """Whether the request may change something."""
        return self.right == "operate"


def _is_storable(text: object) -> bool:
    """Return whether a value is a text that PostgreSQL can store."""
    try:
        return isinstance(text, str) and b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


Authorize = Callable[[Request], "Access | Awaitable[Access | None] | None"]
"""A function or coroutine function that returns what a request may do; ``None``: nothing."""


def read_only(_request: HTTPConnection) -> Access:
    """Let each request read."""
    return Access("read")


async def access_of(authorize: Authorize, request: Request) -> Access | None:
    """Return what a request may do; ``None``: nothing.

    A function that is no coroutine function is called in a thread, because it may read a database.

    :raises TypeError: ``authorize`` has returned something else
    """
    if inspect.iscoroutinefunction(authorize):
        access = await authorize(request)
    else:
        access = await run_in_threadpool(authorize, request)
        if inspect.isawaitable(access):  # an object whose `__call__` is a coroutine function
            access = await access
    if access is not None and not isinstance(access, Access):
        raise TypeError(f"authorize must return an Access or None, not {type(access).__name__}")
    return access


def is_from_own_page(request: Request) -> bool:
    """Return whether a form was sent by a page of the same origin, as far as the browser tells.

    Browsers send ``Sec-Fetch-Site`` since 2023, and a page cannot set it. Older ones send
    ``Origin``. A request with neither is refused, because a login may be a cookie, which a browser
    also sends with a form of another site.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = request.headers.get("origin"), request.headers.get("host")
    if not origin or not host:
        return False
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # such as a bracket that is not closed
        return False

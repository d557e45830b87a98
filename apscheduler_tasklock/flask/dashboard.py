"""The dashboard in a Flask application, below a path of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import tzinfo
from http import HTTPStatus
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from flask import Flask, Response, abort, redirect, request

from apscheduler_tasklock._lock.forking import replace_in_each_child
from apscheduler_tasklock.errors import TaskLockOptionError
from apscheduler_tasklock.flask.configuration import Configuration

if TYPE_CHECKING:
    from apscheduler_tasklock.dashboard import Access

ENDPOINT = "tasklock_dashboard"

# The place in a request's environment where the dashboard finds what the request may do.
_ACCESS = "apscheduler_tasklock.access"


def mount_dashboard(
    app: Flask,
    path: str = "/tasklock",
    *,
    authorize: Callable[[], Access | None] | None = None,
    zone: tzinfo | None = None,
) -> Callable[..., Any]:
    """Serve the dashboard below a path of an application.

    Its database, table and namespace are those of ``app.config``, as for
    :class:`~apscheduler_tasklock.flask.TaskLockScheduler`. It is a view of the application, so what
    runs before each request runs before it, too.

    :param path: the path, such as ``"/tasklock"``
    :param authorize: called in the context of each request, so that ``flask.session`` is there;
        returns an :class:`~apscheduler_tasklock.dashboard.Access`, or ``None`` to refuse the
        request. ``None``: everybody who can send a request can read, and nobody can operate.
    :param zone: the zone of all times; ``None``: the zone of this machine
    :return: the view, for an extension that has to exempt it from a check of its own, such as
        Flask-WTF's ``CSRFProtect``. The dashboard checks itself that forms come from its pages.
    :raises TaskLockOptionError: the configuration has no database, an option is invalid, or the
        extra ``dashboard`` is not installed
    """
    _check_installed()
    prefix = path.rstrip("/")
    if not prefix.startswith("/"):
        raise TaskLockOptionError(
            f"mount_dashboard: the path must be like '/tasklock', not {path!r}"
        )
    configuration = Configuration.of(app)
    served = _Served(configuration, zone)

    def tasklock_dashboard(page: str = "") -> Any:
        if not configuration.enabled:
            abort(HTTPStatus.NOT_FOUND, "TASKLOCK_ENABLED is off, so there are no task locks.")
        access = _read_only() if authorize is None else authorize()
        environ = _environ_below(prefix, page) | {_ACCESS: access}
        return Response.from_app(served.application(), environ)

    def to_dashboard() -> Any:
        # A relative address, because a proxy may have put a prefix before the path.
        return redirect(f"{prefix.rpartition('/')[2]}/")

    methods = ["GET", "POST"]
    app.add_url_rule(prefix, f"{ENDPOINT}_bare", to_dashboard)
    for rule in (f"{prefix}/", f"{prefix}/<path:page>"):
        app.add_url_rule(rule, ENDPOINT, tasklock_dashboard, methods=methods, strict_slashes=False)
    return tasklock_dashboard


class _Served:
    """The dashboard as a WSGI application, which is made in the process that serves it.

    The adapter has an event loop in a thread, which a forked child would lack.
    """

    def __init__(self, configuration: Configuration, zone: tzinfo | None) -> None:
        self._configuration = configuration
        self._zone = zone
        self._lock = threading.Lock()
        self._made: Any = None
        replace_in_each_child(self)

    def _replace_in_child(self) -> None:
        """Make another one at the next request. Called in a forked child."""
        self._lock = threading.Lock()
        self._made = None

    def application(self) -> Any:
        """Return the application of this process."""
        from a2wsgi import ASGIMiddleware

        with self._lock:
            if self._made is None:
                self._made = ASGIMiddleware(self._dashboard())
            return self._made

    def _dashboard(self) -> Any:
        from apscheduler_tasklock.dashboard import dashboard

        options = self._configuration.executor_options
        names = ("schema", "table", "namespace")
        return dashboard(
            self._configuration.executor_database,
            **{name: options[name] for name in names if options.get(name)},
            authorize=_access_of,
            zone=self._zone,
        )


def _check_installed() -> None:
    try:
        import a2wsgi  # noqa: F401  # only whether it is there

        import apscheduler_tasklock.dashboard  # noqa: F401  # only whether what it needs is there
    except ImportError as error:
        raise TaskLockOptionError(
            f"the dashboard needs {error.name}, which the extra apscheduler-tasklock[dashboard] "
            "installs: pip install a2wsgi jinja2 starlette uvicorn"
        ) from error


def _read_only() -> Access:
    from apscheduler_tasklock.dashboard import Access

    return Access("read")


def _access_of(asked: Any) -> Access | None:
    """Return what Flask's view has found that a request may do."""
    found: Access | None = asked.scope["wsgi_environ"][_ACCESS]
    return found


def _environ_below(prefix: str, page: str) -> dict[str, Any]:
    """Return the environment of the current request, as the application below a path gets it."""
    from apscheduler_tasklock.dashboard.app import LARGEST_FORM

    # One byte more than a form may have, so that the dashboard reports a form that is too large. If
    # the application has read the form before the view, the form is written again.
    body = request.stream.read(LARGEST_FORM + 1) or _form(request.form)
    query = request.environ.get("QUERY_STRING", "").encode("latin-1")
    return {
        **request.environ,
        "SCRIPT_NAME": request.environ.get("SCRIPT_NAME", "") + _as_wsgi(prefix),
        "PATH_INFO": _as_wsgi(f"/{page}"),
        # Escaped, because the adapter takes only ASCII.
        "QUERY_STRING": quote(query, safe="%/:=&?~#+!$,;'@()*[]"),
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": BytesIO(body),
    }


def _form(given: Any) -> bytes:
    pairs: list[tuple[str, str]] = list(given.items(multi=True))
    return urlencode(pairs).encode()


def _as_wsgi(text: str) -> str:
    """Return a text as WSGI has texts: its bytes as characters."""
    return text.encode("utf-8", "replace").decode("latin-1")

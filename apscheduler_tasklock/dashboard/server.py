"""The server of the command ``dashboard``: loopback alone, or with a password."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from apscheduler_tasklock.dashboard.access import HEADERS, Access

# The user's name is the operator's name; any name goes with the password.
_CHALLENGE = 'Basic realm="apscheduler-tasklock", charset="UTF-8"'

# Limits the seconds that a stop waits for answers that are under way.
_STOP_TIMEOUT = 5


@dataclass(frozen=True)
class Login:
    """Who may do what with the server's dashboard.

    :ivar password: the password of HTTP Basic; ``None``: none is asked for
    :ivar may_operate: whether readers may also operate
    """

    password: str | None
    may_operate: bool

    def authorize(self, request: Request) -> Access | None:
        """Return what a request may do. :class:`Gate` has checked the password."""
        right = "operate" if self.may_operate else "read"
        user, _ = credentials(request) if self.password is not None else ("", "")
        return Access(right, user or None)  # type: ignore[arg-type]  # one of the two rights


def credentials(request: Request) -> tuple[str, str]:
    """Return the user and the password of HTTP Basic; ``""`` for both if there are none."""
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return "", ""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    return user, password


class Gate:
    """Refuses requests without the password, and requests for another host's name.

    On loopback, a page of any site can let a browser send requests here, under a name of its own
    that it lets point to 127.0.0.1. So only the names of loopback are served there.

    :param login: the password, if one is asked for
    :param on_loopback: whether the server listens on loopback alone
    """

    def __init__(self, app: ASGIApp, login: Login, *, on_loopback: bool) -> None:
        self._app = app
        self._login = login
        self._on_loopback = on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> PlainTextResponse | None:
        if self._on_loopback and not is_loopback(host_of(request.headers.get("host", ""))):
            return PlainTextResponse(
                "This dashboard is only for this machine. Open http://127.0.0.1.",
                HTTPStatus.MISDIRECTED_REQUEST,
                HEADERS,
            )
        password = self._login.password
        if password is None or _is_probe(request):
            return None
        given = credentials(request)[1]
        if hmac.compare_digest(given.encode(), password.encode()):
            return None
        return PlainTextResponse(
            "A password is needed.",
            HTTPStatus.UNAUTHORIZED,
            {**HEADERS, "www-authenticate": _CHALLENGE},
        )


def _is_probe(request: Request) -> bool:
    """Return whether a request is a probe, which has no password, and sees nothing."""
    return request.url.path == "/health" and "verdict" not in request.query_params


def host_of(host: str) -> str:
    """Return the name in a ``Host`` header, without its port; ``""`` if it has none."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name if not port or port.startswith(":") else ""
    return host.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether a name is this machine's alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    app: ASGIApp, login: Login, host: str, port: int, started: Callable[[str], object]
) -> None:
    """Serve the dashboard until Ctrl-C or SIGTERM.

    :param port: the port; 0: any free one
    :param started: called with the address as soon as the server listens
    :raises SystemExit: the server cannot listen there; uvicorn has reported why
    """
    gate = Gate(app, login, on_loopback=is_loopback(host))
    config = uvicorn.Config(
        gate,
        host=host,
        port=port,
        log_level="warning",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_STOP_TIMEOUT,
    )
    _Server(config, started).run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[str], object]) -> None:
        super().__init__(config)
        self._tell = started

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]  # passed on as it came
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._tell(f"http://{shown}:{port}/")

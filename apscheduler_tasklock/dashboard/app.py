"""The dashboard's application: its routes, and the answers to requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone, tzinfo
from functools import partial
from http import HTTPStatus
from importlib.resources import files

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apscheduler_tasklock._words.json_text import as_json
from apscheduler_tasklock.dashboard.access import (
    HEADERS,
    Access,
    Authorize,
    access_of,
    is_from_own_page,
    read_only,
)
from apscheduler_tasklock.dashboard.actions import (
    ACTIONS,
    DURATIONS,
    IN_DOUBT,
    OF_MATCHING,
    Action,
    Asked,
    check_asked,
    page_of,
    what_was_done,
)
from apscheduler_tasklock.dashboard.formats import Formats
from apscheduler_tasklock.dashboard.health import metrics_of, verdict_of
from apscheduler_tasklock.dashboard.matching import TaskFilter
from apscheduler_tasklock.dashboard.pages import Visit, page_of_screen, twin_of_screen
from apscheduler_tasklock.dashboard.queries import Query, check_text, parse
from apscheduler_tasklock.dashboard.reads import SharedReads, in_words_of_a_page
from apscheduler_tasklock.dashboard.screens import (
    SCREENS,
    Context,
    ReadState,
    Screen,
    screen_of,
)
from apscheduler_tasklock.errors import (
    TaskLockDatabaseError,
    TaskLockError,
    TaskLockNotFoundError,
    TaskLockOptionError,
    TaskLockStateError,
    TaskLockUnknownError,
)
from apscheduler_tasklock.locks import TaskLocks
from apscheduler_tasklock.metrics import CONTENT_TYPE
from apscheduler_tasklock.options import check_name
from apscheduler_tasklock.schema.table import DEFAULT_TABLE

# Limits the seconds for which a page waits for the database. A statement without an answer by then
# is cancelled in the server.
TIMEOUT = 5.0

# Limits the bytes of a form.
LARGEST_FORM = 256 * 1024

# The place in a request's scope where a framework puts the frame that it draws around a page.
FRAME = "apscheduler_tasklock.frame"

# The place in a request's scope with the request's path below the dashboard's own.
_PATH = "apscheduler_tasklock.path"


@dataclass(frozen=True)
class Frame:
    """What a framework draws around each page.

    :ivar draw: called with the page's title and its content; returns the whole page
    :ivar sources: the origins of the frame's scripts, styles and pictures, as in a
        Content-Security-Policy
    """

    draw: Callable[[str, str], str]
    sources: str = ""


# The headings of pages that say why a request was not carried out.
_HEADINGS = {
    HTTPStatus.BAD_REQUEST: "This cannot be done",
    HTTPStatus.CONFLICT: "Nothing was changed",
    HTTPStatus.FORBIDDEN: "Not allowed",
    HTTPStatus.NOT_FOUND: "Not found",
    HTTPStatus.SERVICE_UNAVAILABLE: "The database could not be asked",
}

# The heading if the database has answered, but not with what was asked for.
_NOT_GIVEN = "The database has rejected this, or took too long"

_STATUSES: tuple[tuple[type[TaskLockError], HTTPStatus], ...] = (
    (TaskLockNotFoundError, HTTPStatus.NOT_FOUND),
    (TaskLockOptionError, HTTPStatus.BAD_REQUEST),
    (TaskLockStateError, HTTPStatus.CONFLICT),
    (TaskLockDatabaseError, HTTPStatus.SERVICE_UNAVAILABLE),
)


def dashboard(
    database: str | URL | Engine | None = None,
    *,
    schema: str | None = None,
    table: str = DEFAULT_TABLE,
    namespace: str = "",
    authorize: Authorize | None = None,
    zone: tzinfo | None = None,
) -> Starlette:
    """Return the dashboard, an ASGI application that can be mounted under any path.

    It has a database connection of its own, which it opens at the first request.

    :param database: a URL, or an SQLAlchemy engine with the psycopg driver; by default the URL in
        the environment's ``TASKLOCK_DATABASE_URL``
    :param schema: the schema of the task lock table; ``None``: the ``search_path`` decides
    :param table: the name of the task lock table
    :param namespace: only tasks whose names begin with this text are shown and can be changed; all
        replicas and stored jobs are
    :param authorize: called with each request, as a function or a coroutine function; returns an
        :class:`Access`, or ``None`` to refuse the request. ``None``: everybody who can send a
        request can read, and nobody can operate.
    :param zone: the zone of all times; ``None``: the zone of this machine
    :raises TaskLockOptionError: the task lock cannot use ``database``, or a parameter is invalid
    """
    if namespace:
        check_name(namespace, "dashboard")
    locks = TaskLocks(database, schema=schema, table=table, claim_timeout=TIMEOUT)
    return Dashboard(locks, namespace, authorize or read_only, zone).app()


class Dashboard:
    """The answers to the requests of one dashboard.

    :param locks: what is shown and changed
    """

    def __init__(
        self, locks: TaskLocks, namespace: str, authorize: Authorize, zone: tzinfo | None
    ) -> None:
        self._locks = locks
        self._reads = SharedReads(locks, page_limit=locks.timings.longest_answer)
        self._namespace = namespace
        self._authorize = authorize
        self._zone = zone

    def app(self) -> Starlette:
        """Return the application with its routes."""
        static = str(files("apscheduler_tasklock.dashboard") / "static")
        routes: list[Route | Mount] = []
        for name in SCREENS:
            routes.append(Route(f"/{name}", partial(self._page, name), name=name or "overview"))
            twin = f"/{name or 'overview'}.json"
            routes.append(Route(twin, partial(self._twin, name), name=twin))
        routes += [
            Route("/confirm", self._confirm),
            Route("/act", self._act, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Mount("/static", StaticFiles(directory=static), name="static"),
        ]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(_WithHeaders)],
            exception_handlers={
                TaskLockError: self._error,  # type: ignore[dict-item]  # a narrower exception
                HTTPException: self._http_error,  # type: ignore[dict-item]  # a narrower exception
                Exception: self._failure,
            },
            lifespan=self._lifespan,
        )
        # Such a redirect would be to an absolute address, without the prefix that a proxy adds.
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Close the connection when the dashboard's own server stops.

        A mounted application has no lifespan. There the connection ends with the process.
        """
        yield
        await run_in_threadpool(self._locks.close)

    async def _page(self, name: str, request: Request) -> Response:
        access = await self._allowed(request)
        screen = await self._screen(name, request, access)
        return await self._drawn(screen, name, request, access, _status_of(screen))

    async def _twin(self, name: str, request: Request) -> Response:
        access = await self._allowed(request)
        screen = await self._screen(name, request, access)
        text = await run_in_threadpool(twin_of_screen, screen)
        return Response(text, _status_of(screen), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        """Tell a probe that this process serves; with ``verdict``, tell a monitor what is wrong.

        A probe needs no right, sees no name, and hears nothing of the database: otherwise an
        outage would restart the pods.
        """
        if "verdict" not in request.query_params:
            return PlainTextResponse("ok\n")
        await self._allowed(request)
        status, verdict = await run_in_threadpool(verdict_of, self._reads, self._namespace)
        return Response(as_json(verdict), status, media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        await self._allowed(request)
        status, text = await run_in_threadpool(metrics_of, self._reads, self._namespace)
        return Response(text, status, headers={"content-type": CONTENT_TYPE})

    async def _allowed(self, request: Request) -> Access:
        access = await access_of(self._authorize, request)
        if access is None:
            raise HTTPException(HTTPStatus.FORBIDDEN, "You may not see this dashboard.")
        return access

    async def _allowed_to_operate(self, request: Request) -> Access:
        access = await self._allowed(request)
        if not access.may_operate:
            raise HTTPException(HTTPStatus.FORBIDDEN, "You may read here, and change nothing.")
        return access

    async def _screen(self, name: str, request: Request, access: Access) -> Screen:
        query = Query.of(parse(request.scope["query_string"]))
        if access.may_operate and "done" in request.query_params:
            # What was done shows on the page after it, also if another process has done it.
            self._reads.forget()
        context = Context(
            self._reads, query, self._namespace, self._zone, access.may_operate, _now()
        )
        return await run_in_threadpool(screen_of, name, context)

    async def _confirm(self, request: Request) -> Response:
        access = await self._allowed_to_operate(request)
        given = parse(request.scope["query_string"])
        code, action, asked = await run_in_threadpool(self._asked, given, access)
        return await self._question(request, access, code, action, asked)

    async def _question(
        self,
        request: Request,
        access: Access,
        code: str,
        action: Action,
        asked: Asked,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> Response:
        """Return the page on which an action is confirmed."""
        screen = self._blank("confirm.html", action.title)
        screen.drawn = {
            "back": page_of(action, asked),
            "code": code,
            "action": action,
            "asked": asked,
            "is_asked_again": status is HTTPStatus.CONFLICT,
            "kept": {name: asked.fields.text(name) for name in action.kept},
            "durations": DURATIONS,
        }
        return await self._drawn(screen, "confirm", request, access, status)

    async def _act(self, request: Request) -> Response:
        access = await self._allowed_to_operate(request)
        if not is_from_own_page(request):
            raise HTTPException(
                HTTPStatus.FORBIDDEN, "The form was not sent by a page of this dashboard."
            )
        given = parse(await _form(request))
        code, action, asked = await run_in_threadpool(self._asked, given, access)
        if asked.is_of_others:
            status = HTTPStatus.CONFLICT
            return await self._question(request, access, code, action, asked, status)
        done = None
        try:
            done = await run_in_threadpool(action.carry_out, self._locks, asked)
        except TaskLockUnknownError:
            pass  # the next page says so
        except TaskLockError as error:
            return await self._error(request, error, back=page_of(action, asked))
        self._reads.forget()
        # A relative address, because a proxy may have put a prefix before the dashboard's path.
        page = page_of(action, asked, code, done)
        return RedirectResponse(page, HTTPStatus.SEE_OTHER)

    def _asked(self, given: dict[str, list[str]], access: Access) -> tuple[str, Action, Asked]:
        """Return what a form asks for: the action's code, the action, and with what.

        :raises TaskLockOptionError: there is no such action, or it cannot be done with these
        :raises TaskLockError: it is about all tasks that match a filter, and they cannot be read
        """
        fields = Query.of(given)
        code = fields.text("action") or ""
        action = ACTIONS.get(code)
        if action is None:
            raise TaskLockOptionError(f"there is no action {code[:100]!r}")
        names = tuple(dict.fromkeys(filter(None, given.get("name", ()))))
        for name in names:
            check_text("name", name)
        matching = None
        if fields.text("all") == "matching":
            if code not in OF_MATCHING:
                raise TaskLockOptionError(f"{action.title}: not with all that match")
            matching = TaskFilter.of(fields)
            names = matching.names(self._locks, self._namespace)
        asked = Asked(names, fields, self._namespace, self._zone, access.by, matching)
        check_asked(action, asked)
        return code, action, asked

    def _blank(self, template: str, title: str) -> Screen:
        """Return a screen that shows nothing of the database."""
        now = _now()
        return Screen(template, title, Formats(self._zone, now), ReadState(now))

    async def _drawn(
        self,
        screen: Screen,
        page: str,
        request: Request,
        access: Access,
        status: HTTPStatus = HTTPStatus.OK,
    ) -> Response:
        """Return a page, in the frame of the framework if it has put one into the request."""
        frame: Frame | None = request.scope.get(FRAME)
        visit = Visit(
            page,
            request.query_params,
            self._namespace,
            access.may_operate,
            what_was_done(*(request.query_params.get(name, "") for name in ("done", "counts"))),
            request.query_params.get("counts") == IN_DOUBT,
            is_framed=frame is not None,
        )
        text = await run_in_threadpool(page_of_screen, screen, visit)
        if frame is not None:
            text = await run_in_threadpool(frame.draw, screen.title, text)
        return HTMLResponse(text, status)

    async def _error(
        self, request: Request, error: TaskLockError, back: str | None = None
    ) -> Response:
        """Answer a request that could not be carried out.

        :param back: the address of the page from which it came
        """
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), None)
        heading = None if status else _NOT_GIVEN
        status = status or HTTPStatus.SERVICE_UNAVAILABLE
        return await self._told(request, status, in_words_of_a_page(error), back, heading)

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        try:
            status = HTTPStatus(error.status_code)
        except ValueError:  # `authorize` may raise any status
            return PlainTextResponse(error.detail, error.status_code, error.headers)
        no_route = HTTPStatus.NOT_FOUND.phrase  # Starlette's own words
        told = "The dashboard has no such page." if error.detail == no_route else error.detail
        answer = await self._told(request, status, told)
        answer.headers.update(error.headers or {})
        return answer

    async def _failure(self, request: Request, _error: Exception) -> Response:
        """Answer a request that failed because of a bug, here or in ``authorize``.

        The error is raised again afterwards, so that the server logs it.
        """
        told = "The dashboard failed to answer. The log of its server has the reason."
        answer = await self._told(request, HTTPStatus.INTERNAL_SERVER_ERROR, told)
        answer.headers.update(_headers_of(request.scope))
        return answer

    async def _told(
        self,
        request: Request,
        status: HTTPStatus,
        message: str,
        back: str | None = None,
        heading: str | None = None,
    ) -> Response:
        path = request.scope[_PATH]
        if path.endswith(".json"):
            return Response(as_json({"error": message}), status, media_type="application/json")
        if path.count("/") != 1:  # where a page's links would not lead to the other pages
            return PlainTextResponse(message, status)
        screen = self._blank("error.html", heading or _HEADINGS.get(status, status.phrase))
        screen.drawn = {"message": message, "back": back}
        # The page has nothing but the message, so it needs no right.
        return await self._drawn(screen, "error", request, Access("read"), status)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _status_of(screen: Screen) -> HTTPStatus:
    """Return the status of a page or twin, which depends on whether its values were ever read."""
    no_data = screen.read.outage is not None and not screen.read.is_known
    return HTTPStatus.SERVICE_UNAVAILABLE if no_data else HTTPStatus.OK


async def _form(request: Request) -> bytes:
    """Return the body of a form.

    :raises HTTPException: it is too large
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The form is too large.")
    return body


class _WithHeaders:
    """Adds the headers to each answer that limit what a browser does with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the headers to its answer."""
        if scope["type"] == "http":
            # Noted now, because a route of files changes where the path below the dashboard begins.
            scope[_PATH] = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_pairs(_headers_of(scope))]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of the answer to a request."""
    headers = dict(HEADERS)
    frame: Frame | None = scope.get(FRAME)
    if frame is not None:
        headers["content-security-policy"] = "; ".join(
            (
                f"default-src 'self' {frame.sources}".rstrip(),
                f"img-src 'self' data: {frame.sources}".rstrip(),
                "form-action 'self'",
                "base-uri 'none'",
                "frame-ancestors 'none'",
            )
        )
    if scope[_PATH].startswith("/static/"):
        del headers["cache-control"]
    return headers


def _pairs(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]

"""The dashboard in Django's admin: ``urls`` are included below a path of the admin's.

``path("admin/tasklock/", include("apscheduler_tasklock.django.dashboard"))`` in the project's
``urls.py``, before the admin's own line.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any
from urllib.parse import urlsplit

from asgiref.sync import async_to_sync
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.views.decorators import staff_member_required
from django.http import Http404, HttpResponse
from django.shortcuts import redirect, render
from django.urls import path
from django.utils import timezone
from django.utils.safestring import mark_safe
from django.views.decorators.csrf import csrf_exempt
from sqlalchemy.engine import URL
from starlette.requests import Request
from starlette.types import Message

from apscheduler_tasklock.dashboard import Access
from apscheduler_tasklock.dashboard import dashboard as make_dashboard
from apscheduler_tasklock.dashboard.app import FRAME, LARGEST_FORM, Frame
from apscheduler_tasklock.django.configuration import configuration
from apscheduler_tasklock.django.database import database_url

_ACCESS = "apscheduler_tasklock.access"

# The models whose lists show what the dashboard shows, with the rights that let a user see them.
_SEEN = {
    "task": ("view", "change"),
    "run": ("view",),
    "replica": ("view",),
    "job": ("view", "change"),
}
# The models whose lists have actions.
_STEERED = ("task", "job")


# The view needs no token of Django's, because the dashboard itself refuses each form that does not
# come from a page of the same origin. Only because of that check may it be exempt.
@csrf_exempt
@staff_member_required
def dashboard(request: Any, page: str = "") -> Any:
    """Answer a request to the dashboard, in the frame of the admin."""
    configured = configuration()
    if not configured.enabled:
        raise Http404("TASKLOCK_ENABLED is False, so there are no task locks")
    drawn: list[tuple[str, str]] = []

    def draw(title: str, content: str) -> str:
        # The admin's page is drawn later and in this thread, because Django's database connections
        # belong to threads.
        drawn.append((title, content))
        return ""

    scope = _scope_of(request, page)
    scope[_ACCESS] = access_of(request.user)
    scope[FRAME] = Frame(draw, _static_origin())
    app = _application(database_url(), configured.schema, configured.table, configured.namespace)
    status, headers, body = async_to_sync(_answer)(app, scope, _body_of(request))
    if drawn:
        title, content = drawn[-1]
        context = {
            **admin.site.each_context(request),
            "title": title,
            "content": mark_safe(content),  # noqa: S308  # Jinja2 has escaped what is not our own
        }
        answer = render(request, "admin/apscheduler_tasklock/dashboard.html", context)
        answer.status_code = status
    else:
        answer = HttpResponse(body, status=status)
    for name, value in headers:
        if name != "content-length":
            answer[name] = value
    return answer


def to_dashboard(request: Any) -> Any:
    """Redirect from the path without the slash."""
    last = request.path.rpartition("/")[2]
    # A relative address, because a proxy may have put a prefix before the path.
    return redirect(f"{last}/")


def access_of(user: Any) -> Access | None:
    """Return what a user may do, by the permissions of the admin's lists and of their actions."""

    def may(right: str, model: str) -> bool:
        return bool(user.has_perm(f"apscheduler_tasklock.{right}_{model}"))

    if not all(any(may(right, model) for right in rights) for model, rights in _SEEN.items()):
        return None
    operates = all(may("change", model) for model in _STEERED)
    return Access("operate" if operates else "read", user.get_username())


@functools.lru_cache(maxsize=1)
def _application(url: URL, schema: str | None, table: str, namespace: str) -> Any:
    """Return the dashboard of this process, with a connection of its own."""
    return make_dashboard(
        url,
        schema=schema,
        table=table,
        namespace=namespace,
        authorize=_access_in,
        zone=timezone.get_default_timezone(),
    )


def _access_in(request: Request) -> Access | None:
    found: Access | None = request.scope[_ACCESS]
    return found


def _scope_of(request: Any, page: str) -> dict[str, Any]:
    """Return a request of Django's as one of ASGI."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    headers["host"] = request.get_host()
    root = request.path[: len(request.path) - len(page)].rstrip("/")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "root_path": root,
        "query_string": request.META.get("QUERY_STRING", "").encode("latin-1"),
        "headers": [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ],
        "server": None,
        "client": None,
    }


def _body_of(request: Any) -> bytes:
    # One byte more than a form may have, so that the dashboard reports a form that is too large. If
    # a middleware has read the form before the view, the form is written again.
    if request.method != "POST":
        return b""
    if "_post" in vars(request):
        return request.POST.urlencode().encode()  # type: ignore[no-any-return]  # Django has no types
    return request.read(LARGEST_FORM + 1)  # type: ignore[no-any-return]  # Django has no types


async def _answer(app: Any, scope: dict[str, Any], body: bytes) -> tuple[int, Any, bytes]:
    """Return the status, the headers and the body of an answer."""
    started: list[Message] = []
    parts: list[bytes] = []
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    is_over = asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                is_over.set()

    await app(scope, receive, send)
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in started[0]["headers"]
    ]
    return started[0]["status"], headers, b"".join(parts)


def _static_origin() -> str:
    """Return the origin of the admin's own files, if it is another one."""
    parts = urlsplit(settings.STATIC_URL or "")
    return f"{parts.scheme or 'https'}://{parts.netloc}" if parts.netloc else ""


urlpatterns = [
    path("dashboard", to_dashboard),
    path("dashboard/", dashboard, name="tasklock_dashboard"),
    path("dashboard/<path:page>", dashboard),
]

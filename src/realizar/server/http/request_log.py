"""The outermost middleware: it gives every request an id, a line in the log, and an answer even after a failure."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realizar.server.errors import to_api_error
from realizar.server.figures import ServerFigures
from realizar.server.http.dialects import dialect_of, error_response, note_error
from realizar.server.http.disconnects import ClientDisconnectedError

_LOG = logging.getLogger("realizar.access")
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_QUIET = ("/health", "/ready", "/metrics")
_PAGE_FILES = "/static/"  # the chat page asks for some thirty when it opens


class RequestLogMiddleware:
    """Gives every request an id, or keeps the client's own if it is well-formed, and logs the request's end.

    Handlers put further figures into `scope["state"]["notes"]`. `names_models`: lines name the model, one of several.
    """

    def __init__(
        self, app: ASGIApp, figures: ServerFigures, *, enabled: bool = True, names_models: bool = False
    ) -> None:
        self._app, self._figures, self._enabled = app, figures, enabled
        self._hidden = () if names_models else ("model",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["notes"] = request_id, {}
        header = dialect_of(scope).request_id_header.encode()
        started_s = time.monotonic()
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (header, request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientDisconnectedError:
            state["disconnected"] = True
        except Exception as error:  # noqa: BLE001 - the last barrier: no exception may reach the client
            api_error = to_api_error(error)
            note_error(scope, api_error)
            if not status:
                await error_response(scope, api_error)(scope, receive, send_noting)
        finally:
            self._count(scope, status)
            if self._enabled:
                _write_line(scope, status, time.monotonic() - started_s, self._hidden)

    def _count(self, scope: Scope, status: int) -> None:
        state = scope["state"]
        if "error_status" in state:
            self._figures.failed(state["error_status"], state["error_code"])
        if not _is_quiet(scope, status):
            self._figures.ended(status, disconnected=state.get("disconnected", False))


def _request_id(scope: Scope) -> str:
    given: list[bytes] = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _GOOD_ID.fullmatch(given[0]):
        return given[0].decode()
    return f"req-{secrets.token_hex(12)}"


def _is_quiet(scope: Scope, status: int) -> bool:
    """True for a usual answer to a probe or a scrape. 503 is usual for `/ready` during loading."""
    return scope["path"] in _QUIET and status in (200, 503)


def _level(scope: Scope, status: int) -> int:
    """The level of a request's line: DEBUG for what comes often and says nothing."""
    is_page_file = scope["path"].startswith(_PAGE_FILES) and status in (200, 304)
    return logging.DEBUG if is_page_file or _is_quiet(scope, status) else logging.INFO


def _write_line(scope: Scope, status: int, duration_s: float, hidden: Collection[str]) -> None:
    """One line, whose `fields` are what it says, for lines of JSON."""
    state = scope["state"]
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": ascii(scope["path"])[1:-1][:200],
        "status": "disconnected" if state.get("disconnected", False) else status,
        "duration_s": round(duration_s, 3),
        "id": state["request_id"],
        "client": client[0] if client else "",
        **{name: round(value, 3) if isinstance(value, float) else value for name, value in state["notes"].items()},
    }
    if code := state.get("error_code"):
        fields["error"] = code
    shown = " ".join(
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in list(fields.items())[4:]
        if name not in hidden and value != ""
    )
    _LOG.log(
        _level(scope, status),
        "%s %s %s %.3fs %s",
        fields["method"],
        fields["path"],
        fields["status"],
        duration_s,
        shown,
        extra={"fields": fields},
    )

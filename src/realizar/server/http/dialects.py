"""`Dialect`: an API that the server speaks, with its routes and its form of errors.

Everything that answers an error, the layers before routing too, finds the dialect by the request's path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from realizar.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """A route, as the application serves it and `/openapi.json` describes it.

    Attributes:
        path: in Starlette's form.
        summary: one sentence.
        body: the record of the request's body; None without one.
        verb: the method; None is POST with a body, otherwise GET.
    """

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: type[msgspec.Struct] | None = None
    verb: str | None = None

    @property
    def method(self) -> str:
        """The method that the route answers; a GET's answers HEAD too."""
        return self.verb or ("GET" if self.body is None else "POST")


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The form of a dialect's streams.

    Attributes:
        ping: sent while no event comes; clients pass over it.
        end: sent after the last event.
        error: the last event of a stream that fails, in place of the end.
        media_type: the `content-type` of its answers.
    """

    ping: bytes
    end: bytes
    error: Callable[[ApiError], bytes]
    media_type: str = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that the server speaks.

    Attributes:
        name: for the names of its schemas.
        error_body: the JSON object of an error's answer; `error_schema` is its JSON schema.
        statuses: its HTTP statuses, where they are not the server's.
        request_id_header: the header of an answer that has the request's id.
        folder: what begins with this is the dialect's too, such as `/api/`; empty without one.
        takes_any_type: a body's `Content-Type` may be any or missing, as its clients have it, unless a browser sent it.
    """

    name: str
    routes: Sequence[ApiRoute]
    error_body: Callable[[ApiError], Any]
    error_schema: dict[str, Any]
    stream: StreamForm
    statuses: Mapping[int, int] = field(default_factory=dict)
    request_id_header: str = "x-request-id"
    folder: str = ""
    takes_any_type: bool = False

    def owns(self, path: str) -> bool:
        """True if a request's path is one of the dialect's, lies below one, or fits one that ends in a parameter."""
        if self.folder and path.startswith(self.folder):
            return True
        return any(f"{path}/".startswith(f"{route.path}/") or _begins(path, route.path) for route in self.routes)


def dialect_of(scope: Scope) -> Dialect:
    """The dialect of a request: that of its path, otherwise the server's first."""
    dialects: Sequence[Dialect] = scope["app"].state.dialects
    return next((dialect for dialect in dialects if dialect.owns(scope["path"])), dialects[0])


def note_error(scope: Scope, error: ApiError) -> None:
    """Note the error of a request, for its line in the log and for the counts of errors."""
    state = scope.setdefault("state", {})
    state["error_code"], state["error_status"] = error.code, error.status


def error_response(scope: Scope, error: ApiError) -> Response:
    """The whole HTTP answer of an error, in the form of the request's dialect. The error is noted."""
    note_error(scope, error)
    dialect = dialect_of(scope)
    body = msgspec.json.encode(dialect.error_body(error))
    return Response(body, dialect.statuses.get(error.status, error.status), error.headers, "application/json")


def _begins(path: str, route: str) -> bool:
    fixed, brace, _ = route.partition("{")
    return bool(brace) and path.startswith(fixed)

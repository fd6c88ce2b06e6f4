"""Request bodies: read within bounds of size and time, and decoded into the record of the endpoint."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from realizar.server.errors import ApiError, closing, refused
from realizar.server.http.body_json import parse_json, parsed_size
from realizar.server.http.dialects import dialect_of
from realizar.server.http.request import compute, settings_of
from realizar.server.http.request_memory import FREE_BYTES, RequestLease, lease_of
from realizar.server.http.unknown_fields import IGNORED, IgnoredFields, full_path, unknown_field
from realizar.server.settings import ServerSettings

_DISCARDED = 4  # bodies up to this many times the limit are read to their end before they are refused
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)

R = TypeVar("R", bound=msgspec.Struct)


async def read_record(request: Request, record: type[R]) -> R:
    """ApiError: 400 malformed, 408 too slow, 413 too large, 415 not plain JSON, 429 too much in flight."""
    lease = lease_of(request)
    body = await read_body(request, settings_of(request), lease)
    lease.body_bytes = len(body)
    if len(body) <= FREE_BYTES:
        return _decode(body, record)
    lease.hold(parsed_size(body))
    return await compute(request, lambda _: _decode(body, record))


async def read_body(request: Request, settings: ServerSettings, lease: RequestLease) -> bytes:
    """Read all bytes of a body. Errors are those of `read_record`.

    A body that is too large is still read, up to a bound, and dropped: closing a connection while its client writes
    resets it, and the client may lose the answer.
    """
    _check_headers(request)
    size = _declared_size(request)
    limit = settings.max_body_bytes
    if size > limit and (size > _DISCARDED * limit or "100-continue" in request.headers.get("expect", "").lower()):
        raise _too_large(settings)  # far too large, or a client that has not begun to write
    too_large = size > limit
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                too_large = too_large or size > limit
                if size > _DISCARDED * limit:
                    break
                if too_large:
                    parts.clear()
                else:
                    lease.hold(size)
                    parts.append(part)
    except TimeoutError:
        if too_large:
            raise _too_large(settings) from None
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise closing(408, message, "request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", code="incomplete_body") from None
    if too_large:
        raise _too_large(settings)
    return b"".join(parts)


def convert(data: Any, record: type[R]) -> R:
    """Convert a parsed body to its record. It raises ApiError 400 with `param`, the path of the field."""
    if not isinstance(data, dict):
        raise refused("the body must be a JSON object", code="invalid_type")
    try:
        try:
            return msgspec.convert(data, record)
        except msgspec.ValidationError:
            return msgspec.convert(fitted(data, record, IGNORED.get()), record)
    except msgspec.ValidationError as error:
        raise _translated(str(error), record) from None
    except RecursionError:
        raise refused("the body is nested too deeply", code="invalid_json") from None


def _decode(body: bytes, record: type[R]) -> R:
    return convert(parse_json(body), record)


def _translated(message: str, record: type[msgspec.Struct]) -> ApiError:
    place = _PLACE.match(message)
    reason, path = (place[1], place[2]) if place else (message, "")
    path = path.replace("[...]", "")
    if unknown := _UNKNOWN.match(reason):
        return unknown_field(path, unknown[1], _fields_at(record, path))
    if missing := _MISSING.match(reason):
        full = f"{path}.{missing[1]}" if path else missing[1]
        return refused(f"Missing required parameter: '{full}'", full, "missing_required_parameter")
    what = f"Invalid value for '{path}': " if path else "Invalid body: "
    text = ascii(reason)[1:-1].replace("`", "'")
    return refused(f"{what}{text}", path or None, "invalid_type" if "Expected" in reason else "invalid_value")


def _fields_at(record: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    found: type[msgspec.Struct] | None = record
    for name in re.findall(r"[A-Za-z_]\w*", path):
        kinds = {field.encode_name: field.type for field in msgspec.structs.fields(found)} if found else {}
        found = _record_in(kinds.get(name))
    return found.__struct_fields__ if found else ()


def _record_in(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _record_in(part))), None)


def _declared_size(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isdigit() else 0


def _check_headers(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "compressed bodies are not accepted; send plain JSON", code="unsupported_encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json") and not _may_have_any_type(request):
        # A page of another origin can send other content types, or none, without a preflight request.
        raise ApiError(
            415, "the request needs the header 'Content-Type: application/json'", code="unsupported_media_type"
        )


def _may_have_any_type(request: Request) -> bool:
    """True where the dialect takes bodies of any type, and no page sent this one.

    Browsers' POSTs have an `Origin`. Old ones leave it out of a form's, and then their name tells: each begins so.
    """
    headers = request.headers
    from_browser = "origin" in headers or "sec-fetch-site" in headers
    from_browser |= headers.get("user-agent", "").lower().startswith("mozilla/")
    return not from_browser and dialect_of(request.scope).takes_any_type


def _too_large(settings: ServerSettings) -> ApiError:
    return closing(413, f"the body is over its limit of {settings.max_body_bytes} bytes", "request_too_large")


# `fitted` makes a parsed body fit its record: without fields that nothing knows, and with integers written as 40.0.
#
# Clients without an integer type write integers as decimal fractions.

_type_info = functools.cache(inspect.type_info)


def fitted(data: Any, record: type[msgspec.Struct], ignored: IgnoredFields | None) -> Any:
    """A body with integers for 40.0 and the like where its record takes no fractions. It is changed in place.

    `ignored` notes the fields that the record, and the records in it, do not know, and that are removed; None leaves
    them. It raises ApiError 400 if a field must not be removed.
    """
    return _fitted("", data, _type_info(record), ignored)


def _fitted(path: str, value: Any, kind: inspect.Type, ignored: IgnoredFields | None) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, float):
        takes_integers = any(isinstance(each, inspect.IntType) for each in kinds)
        takes_fractions = any(isinstance(each, inspect.FloatType) for each in kinds)
        return int(value) if takes_integers and not takes_fractions and value.is_integer() else value
    for each in kinds:
        if isinstance(each, inspect.ListType) and isinstance(value, list):
            value[:] = [_fitted(f"{path}[{at}]", item, each.item_type, ignored) for at, item in enumerate(value)]
        elif isinstance(each, inspect.StructType) and isinstance(value, dict):
            fields = {field.encode_name: field.type for field in each.fields}
            for name in list(value):
                if name in fields:
                    value[name] = _fitted(f"{path}.{name}" if path else name, value[name], fields[name], ignored)
                elif ignored is not None:
                    ignored.note(full_path(path, name), value.pop(name))
    return value

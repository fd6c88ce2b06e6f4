"""Routes of kept responses: `GET` and `DELETE /v1/responses/{id}`, its input items, and its cancellation."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.errors import ApiError, refused, unsupported
from realizar.server.http.request import compute
from realizar.server.http.request_memory import lease_of
from realizar.server.http.unknown_fields import unknown_field
from realizar.server.responses.conversation import check_include
from realizar.server.responses.store import ResponseStore, StoredResponse, items_of

_MAX_LISTED, _LISTED = 100, 20
_LIST_FIELDS = ("after", "before", "include", "include[]", "limit", "order")


def store_of(request: Request) -> ResponseStore | None:
    """The server's store; None if it keeps no responses."""
    store = request.app.state.response_store
    return store if isinstance(store, ResponseStore) else None


def owner_of(request: Request) -> str:
    """The client that a response belongs to. Without keys a response is its own secret."""
    return lease_of(request).client.name if request.app.state.settings.api_keys else ""


async def show_response(request: Request) -> Response:
    for name, value in request.query_params.multi_items():
        if name == "stream" and value.lower() == "false":
            continue
        if name in ("include", "include[]"):
            check_include([value])
        elif name in ("stream", "starting_after", "include_obfuscation"):
            raise unsupported(name, "is not supported: a kept response has no events")
        else:
            raise unknown_field("", name, ("include", "stream"))
    return Response(_found(request)[1].response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    store, stored = _found(request)
    store.delete(stored.id, stored.owner)
    return _answer({"id": stored.id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """Answer with the items that led to a kept response, the last one first unless they are wanted in order."""
    query = request.query_params
    for name, value in query.multi_items():
        if name not in _LIST_FIELDS:
            raise unknown_field("", name, _LIST_FIELDS)
        if name.startswith("include"):
            check_include([value])
    if "before" in query:
        raise unsupported("before", "is not supported; use after")
    order, limit = query.get("order", "desc"), _limit(query.get("limit"))
    if order not in ("asc", "desc"):
        raise refused("order must be asc or desc", "order", "invalid_value")
    store, stored = _found(request)
    chain = store.chain(stored.id, stored.owner)
    size = sum(each.num_bytes for each in chain)
    listed = await compute(request, lambda _: _listed(chain, query.get("after"), order, limit), size)
    return _answer(listed)


async def cancel_response(request: Request) -> Response:
    """Refuse: no response is made in the background."""
    _, stored = _found(request)
    raise refused(f"{stored.id} can't be cancelled: background is not supported, so it is complete", "response_id")


def _found(request: Request) -> tuple[ResponseStore, StoredResponse]:
    store, response_id = store_of(request), request.path_params["response_id"]
    if store is None:
        raise ApiError(
            404,
            f"Response with id {response_id[:100]!a} not found: the server keeps no responses "
            "(--stored-responses turns it on).",
            param="response_id",
            code="response_not_found",
        )
    return store, store.find(response_id, owner_of(request))


def _limit(given: str | None) -> int:
    if given is None:
        return _LISTED
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if not 1 <= limit <= _MAX_LISTED:
        raise refused(f"limit must be between 1 and {_MAX_LISTED}", "limit", "invalid_value")
    return limit


def _listed(chain: list[StoredResponse], after: str | None, order: str, limit: int) -> dict[str, Any]:
    items = items_of(chain, with_last_output=False)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise refused("after names no item of this response", "after", "invalid_value")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page] or [""]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": len(items) > limit,
    }


def _answer(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

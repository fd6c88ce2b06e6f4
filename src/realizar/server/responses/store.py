"""`ResponseStore` keeps responses for later requests that name them, in memory and within bounds.

The routes of kept responses are here too: `GET` and `DELETE /v1/responses/{id}`, its input items, and its cancellation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import new_id
from realizar.server.errors import ApiError, refused, unsupported
from realizar.server.http.request import compute, json_response
from realizar.server.http.request_memory import lease_of
from realizar.server.http.unknown_fields import unknown_field
from realizar.server.responses.conversation import check_include
from realizar.server.responses.output_items import PREFIXES
from realizar.server.responses.records import ResponsesRequest

_OVERHEAD_BYTES = 1024
"""Objects around the JSON of a response, rounded up."""
_ID_BYTES = 200
"""An item's id and its place in a table, likewise."""

_LONGEST_ID = 128  # characters; an item with a longer id of a client's own can't be referred to
_MAX_LISTED, _LISTED = 100, 20
_LIST_FIELDS = ("after", "before", "include", "include[]", "limit", "order")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A kept response.

    Attributes:
        owner: the client that may name it; empty where all may.
        client: the client whose share of the store it takes.
        response: the response object, as JSON.
        items: the list of its own input items, as JSON.
        previous: the id of the response that it goes on from.
        item_ids: ids of its own input items and of its output.
    """

    id: str
    owner: str
    client: str
    response: bytes
    items: bytes
    previous: str | None
    item_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD_BYTES + _ID_BYTES * len(self.item_ids)


class ResponseStore:
    """Responses by their ids, used by one thread; one that is larger than `max_bytes` is not kept.

    Where there are too many, the least recently used one of the client that has the most is dropped, so that one
    client's responses push no other's out of its share.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._numbers: Counter[str] = Counter()  # of responses, by client
        self._bytes: Counter[str] = Counter()
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._of_items: dict[tuple[str, str], str] = {}  # the response of an item, by the client and the item's id

    def keep(self, stored: StoredResponse) -> None:
        """Keep a response; others are dropped for it."""
        if stored.num_bytes > self._max_bytes or self._max_responses < 1:
            return
        self._responses[stored.id] = stored
        self._numbers[stored.client] += 1
        self._bytes[stored.client] += stored.num_bytes
        self._of_items |= dict.fromkeys(((stored.owner, each) for each in stored.item_ids), stored.id)
        for held, most in ((self._numbers, self._max_responses), (self._bytes, self._max_bytes)):
            while held.total() > most:
                largest = max(held.values())
                self._drop(next(name for name, each in self._responses.items() if held[each.client] == largest))

    def find(self, response_id: str, owner: str) -> StoredResponse:
        """The response of an id. Raises ApiError: 404; there is none for this client."""
        found = self._responses.get(response_id)
        if found is None or found.owner != owner:
            raise _not_found(response_id)
        return found

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response. Those that go on from it can't be gone on from any more. Raises as `find` does."""
        self._drop(self.find(response_id, owner).id)

    def with_item(self, item_id: str, owner: str) -> StoredResponse | None:
        """The response that has an item, which counts as used; None if there is none for this client."""
        found = self._of_items.get((owner, item_id))
        if found is None:
            return None
        self._responses.move_to_end(found)
        return self._responses[found]

    def _drop(self, response_id: str) -> None:
        dropped = self._responses.pop(response_id)
        self._numbers[dropped.client] -= 1
        self._bytes[dropped.client] -= dropped.num_bytes
        if not self._numbers[dropped.client]:
            del self._numbers[dropped.client], self._bytes[dropped.client]
        for item_id in dropped.item_ids:
            if self._of_items.get((dropped.owner, item_id)) == response_id:
                del self._of_items[dropped.owner, item_id]

    def chain(self, response_id: str, owner: str) -> list[StoredResponse]:
        """A response and those that it goes on from, the first one first; all count as used.

        Raises ApiError: 400; one of them is not there.
        """
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self._responses.get(next_id)
            if stored is None or stored.owner != owner:
                reason = "not found" if next_id == response_id else f"not whole: {next_id} is not there any more"
                message = f"Previous response with id {response_id[:100]!a} {reason}."
                raise refused(message, "previous_response_id", "previous_response_not_found")
            found.append(stored)
            next_id = stored.previous
        for stored in found:  # the first one last, so that it is dropped after those that need it
            self._responses.move_to_end(stored.id)
        return found[::-1]


def _not_found(response_id: str, reason: str = "") -> ApiError:
    message = f"Response with id {response_id[:100]!a} not found{reason}."
    return ApiError(404, message, param="response_id", code="response_not_found")


# Items of kept responses: read for a request that goes on from them, and listed.


def keep_response(
    store: ResponseStore,
    request: ResponsesRequest,
    response_id: str,
    owner: str,
    client: str,
    response: bytes,
    output_ids: Sequence[str],
) -> None:
    """Keep the response of a checked request, whose input items are kept in full: with types, ids and parts.

    Args:
        owner, client, response: as in `StoredResponse`.
        output_ids: ids of its output.
    """
    given = request.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = [_in_full(item) for item in given or ()]
    listed = (*(item["id"] for item in items), *output_ids)
    ids = tuple(each for each in listed if isinstance(each, str) and len(each) <= _LONGEST_ID)
    previous = request.previous_response_id
    store.keep(StoredResponse(response_id, owner, client, response, msgspec.json.encode(items), previous, ids))


def items_of(chain: Sequence[StoredResponse], *, with_last_output: bool) -> list[dict[str, Any]]:
    """The items of a conversation, in order, to the output of the last response or, without it, to its input."""
    items: list[dict[str, Any]] = []
    for place, stored in enumerate(chain, start=1):
        items += msgspec.json.decode(stored.items)
        if with_last_output or place < len(chain):
            items += msgspec.json.decode(stored.response)["output"]
    return items


def _in_full(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    full = {"type": kind, "status": "completed", **item}
    if full.get("id") is None:
        full["id"] = new_id(PREFIXES[kind])
    if isinstance(full.get("content"), str):
        part = "output_text" if full.get("role") == "assistant" else "input_text"
        full["content"] = [{"type": part, "text": full["content"]}]
    return full


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
    return json_response({"id": stored.id, "object": "response", "deleted": True})


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
    return json_response(listed)


async def cancel_response(request: Request) -> Response:
    """Refuse: no response is made in the background."""
    _, stored = _found(request)
    raise refused(f"{stored.id} can't be cancelled: background is not supported, so it is complete", "response_id")


def _found(request: Request) -> tuple[ResponseStore, StoredResponse]:
    store, response_id = store_of(request), request.path_params["response_id"]
    if store is None:
        raise _not_found(response_id, ": the server keeps no responses (--stored-responses turns it on)")
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

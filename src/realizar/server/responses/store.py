"""`ResponseStore` keeps responses for later requests that name them, in memory and within bounds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realizar.server.api import new_id
from realizar.server.errors import ApiError, refused
from realizar.server.responses.records import ResponsesRequest

_OVERHEAD_BYTES = 1024
"""Objects around the JSON of a response, rounded up."""
_ID_BYTES = 200
"""An item's id and its place in a table, likewise."""


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
            shown = ascii(response_id[:100])
            raise ApiError(404, f"Response with id {shown} not found.", param="response_id", code="response_not_found")
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
                raise refused(
                    f"Previous response with id {response_id[:100]!a} {reason}.",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            found.append(stored)
            next_id = stored.previous
        for stored in found:  # the first one last, so that it is dropped after those that need it
            self._responses.move_to_end(stored.id)
        return found[::-1]


# Items of kept responses: read for a request that goes on from them, and listed.

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


def kept_input(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input items of a checked request in full: with types, ids and parts."""
    given = request.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_in_full(item) for item in given or ()]


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
        full["id"] = new_id(_PREFIXES[kind])
    if isinstance(full.get("content"), str):
        part = "output_text" if full.get("role") == "assistant" else "input_text"
        full["content"] = [{"type": part, "text": full["content"]}]
    return full

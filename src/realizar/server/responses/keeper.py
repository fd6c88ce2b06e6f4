"""`Keeper` puts one response into the store when it has ended."""

from __future__ import annotations

from typing import Any

import msgspec

from realizar.server.responses.records import ResponsesRequest
from realizar.server.responses.store import ResponseStore, StoredResponse
from realizar.server.responses.stored_items import kept_input

_LONGEST_ID = 128  # characters; an item with a longer id of a client's own can't be referred to


class _Output(msgspec.Struct):
    """The part of a response that is read. Attributes: output: its items."""

    output: list[dict[str, Any]]


_OUTPUT = msgspec.json.Decoder(_Output)


class Keeper:
    """Keeps the response of one request. Args: owner, client: as in `StoredResponse`."""

    def __init__(self, store: ResponseStore, owner: str, client: str, request: ResponsesRequest) -> None:
        self._store, self._owner, self._client, self._request = store, owner, client, request

    def keep(self, response_id: str, response: bytes) -> None:
        """Keep a response, given as JSON."""
        items = kept_input(self._request)
        listed = (item["id"] for item in (*items, *_OUTPUT.decode(response).output))
        ids = tuple(each for each in listed if isinstance(each, str) and len(each) <= _LONGEST_ID)
        previous = self._request.previous_response_id
        kept = msgspec.json.encode(items)
        self._store.keep(StoredResponse(response_id, self._owner, self._client, response, kept, previous, ids))

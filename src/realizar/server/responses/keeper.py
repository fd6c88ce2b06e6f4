"""`Keeper` puts one response into the store when it has ended."""

from __future__ import annotations

import msgspec

from realizar.server.responses.records import ResponsesRequest
from realizar.server.responses.store import ResponseStore, StoredResponse
from realizar.server.responses.stored_items import kept_input


class Keeper:
    """Keeps the response of one request, for its client."""

    def __init__(self, store: ResponseStore, owner: str, request: ResponsesRequest) -> None:
        self._store, self._owner, self._request = store, owner, request

    def keep(self, response_id: str, response: bytes) -> None:
        """Keep a response, given as JSON."""
        items = msgspec.json.encode(kept_input(self._request))
        previous = self._request.previous_response_id
        self._store.keep(StoredResponse(response_id, self._owner, response, items, previous))

"""Items of `input` that are references to items of kept responses: they are replaced by the items that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realizar.server.errors import refused, unsupported
from realizar.server.http.unknown_fields import known_only
from realizar.server.responses.records import InputTokensRequest
from realizar.server.responses.store import ResponseStore, StoredResponse
from realizar.server.responses.stored_items import items_of

_KIND = "item_reference"


def responses_with(record: InputTokensRequest, store: ResponseStore | None, owner: str) -> dict[str, StoredResponse]:
    """The kept responses of the items that a request refers to, by the items' ids.

    Raises:
        ApiError: 400; an item is not there or is meant twice, or the server keeps none. References to one item would
            make a small request as large as a client likes.
    """
    found: dict[str, StoredResponse] = {}
    given = record.input
    for place, item in enumerate(given if isinstance(given, list) else ()):
        if not _is_reference(item):
            continue
        where = f"input[{place}]"
        known_only(where, item, ("type", "id"))
        item_id = item.get("id")
        if not isinstance(item_id, str):
            raise refused(f"{where}.id must be text", f"{where}.id")
        if store is None:
            raise unsupported(
                f"{where}.type", f"'{_KIND}' is not supported: the server keeps no responses (--stored-responses does)"
            )
        if item_id in found:
            raise refused(f"{where}.id: the item {item_id[:100]!a} is there already", f"{where}.id", "duplicate_item")
        stored = store.with_item(item_id, owner)
        if stored is None:
            raise refused(f"{where}.id: there is no item {item_id[:100]!a}", f"{where}.id", "item_not_found")
        found[item_id] = stored
    return found


def with_items(record: InputTokensRequest, found: Mapping[str, StoredResponse]) -> None:
    """Replace the references of a request by their items, in place. Args: found: of `responses_with`."""
    if not found or not isinstance(record.input, list):
        return
    items_by_response = {
        stored.id: {item["id"]: item for item in items_of([stored], with_last_output=True)}
        for stored in {each.id: each for each in found.values()}.values()
    }
    items = {item_id: items_by_response[stored.id][item_id] for item_id, stored in found.items()}
    record.input[:] = [dict(items[item["id"]]) if _is_reference(item) else item for item in record.input]


def _is_reference(item: Mapping[str, Any]) -> bool:
    """True also without a type, which the API lets clients leave out: no other item has an id alone."""
    return item.get("type") == _KIND or (item.get("type") is None and "id" in item and "role" not in item)

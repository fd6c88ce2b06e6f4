"""Items of kept responses: read for a request that goes on from them, and listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from realizar.server.api import new_id
from realizar.server.responses.records import ResponsesRequest
from realizar.server.responses.store import StoredResponse

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
    """The items of a conversation, in their order.

    Args:
        with_last_output: True to end with the output of the last response, otherwise with its input.
    """
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

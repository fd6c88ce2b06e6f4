"""What a router knows: keys of replicas' prefix caches, and the wish that goes with a request.

Ray Serve fetches the statistics and gives each router the last ones, so that a report is always complete. It goes
through the controller to every front each second in which it changes; so keys are short, and not too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.kv_cache.block_keys import CacheChanges
from realizar.replicas.prompt_keys import prompt_keys, report_of
from realizar.replicas.routing import HeldKeys, KeyChanges, KeyReport
from realizar.request import Request

KEY_BYTES = 8
"""Bytes of a key in a report: prefixes are told apart, and a mistake only costs time."""
MOST_KEYS = 32_768
"""Keys of one report: 262 KB."""


class HeldBlocks:
    """The short keys of what an engine holds."""

    def __init__(self) -> None:
        self._held, self._number = HeldKeys(), 0

    def take(self, changes: CacheChanges) -> None:
        self._held.take(report_of(changes, 0, self._number, KEY_BYTES))
        self._number += 1

    def clear(self) -> None:
        self.take(CacheChanges(complete=True))

    def report(self, incarnation: int) -> dict[str, Any]:
        blocks, ends = self._held.blocks, self._held.ends
        joined_ends = None if ends is None else _joined(ends)
        return {"incarnation": incarnation, "number": self._number, "blocks": _joined(blocks), "ends": joined_ends}


def read_report(stats: Mapping[str, Any]) -> KeyReport | None:
    """The report in a replica's routing statistics; None before it has made one."""
    if "incarnation" not in stats:
        return None
    ends = None if stats["ends"] is None else KeyChanges(_apart(stats["ends"]))
    return KeyReport(stats["incarnation"], stats["number"], KeyChanges(_apart(stats["blocks"])), ends, complete=True)


@dataclass(slots=True, eq=False)
class RouteWish:
    """The router of the same process reads this; a replica gets a copy of how it was when the request was sent.

    Attributes:
        keys: of the full blocks of the prompt, as in reports.
        num_tokens: of the prompt.
        avoided: name of a replica that has just lost the request, or None.
        has_begun: its first tokens have come. has_ended: nothing of it is open any more.
    """

    keys: Sequence[bytes]
    num_tokens: int
    num_choices: int
    avoided: str | None = None
    has_begun: bool = False
    has_ended: bool = False


def wish_of(request: Request, block_tokens: int, avoided: str | None) -> RouteWish:
    """The wish of a request. `block_tokens` are of the engines' prefix caches; 0 without one."""
    keys = tuple([key[:KEY_BYTES] for key in prompt_keys(request, block_tokens)])
    return RouteWish(keys, request.num_prompt_tokens, request.sampling.n, avoided)


def _joined(keys: OrderedDict[bytes, None]) -> bytes:
    """The keys as one column.

    Of too many the oldest half, where the prefixes begin that many prompts share, and the newest half are sent.
    """
    held = list(keys)
    if len(held) > MOST_KEYS:
        held = held[: MOST_KEYS // 2] + held[-MOST_KEYS // 2 :]
    return b"".join(held)


def _apart(column: bytes) -> Sequence[bytes]:
    return [column[start : start + KEY_BYTES] for start in range(0, len(column), KEY_BYTES)]

"""Shares of a step's deltas: those of some of its choices, or the same with other numbers.

What walks through every part of `StepDeltas` between `GrowingDeltas`, which makes them, and their readers stands here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from realizar.step_deltas import StepDeltas, StepLogprobs

_LISTED = ("starts", "snapshots", "ends", "failures")  # whose parts name a choice each
_LOGPROBS = ("logprobs", "prompt_logprobs")
_NUMBERS_OF_ONE = 1 << 40  # far more than one engine has choices


def named_numbers(deltas: StepDeltas) -> list[int]:
    numbers = deltas.number_list()
    for columns in (*deltas.logprobs, *deltas.prompt_logprobs):
        numbers += columns.number_list()
    for name in _LISTED:
        numbers += [part.number for part in getattr(deltas, name)]
    return list(dict.fromkeys(numbers))


def share_of(deltas: StepDeltas, choices: Collection[int]) -> StepDeltas:
    parts: dict[str, Any] = {
        name: tuple([part for part in getattr(deltas, name) if part.number in choices]) for name in _LISTED
    }
    for name in _LOGPROBS:
        parts[name] = tuple(
            [
                StepLogprobs(_picked(part.numbers, np.int64, mine), part.entries.picked(mine))
                for part in getattr(deltas, name)
                if (mine := _indices(part, choices))
            ]
        )
    mine = _indices(deltas, choices)
    numbers, token_ids = _picked(deltas.numbers, np.int64, mine), _picked(deltas.token_ids, np.int32, mine)
    return StepDeltas(deltas.produced_s, numbers, token_ids, **parts)


def renumbered(deltas: StepDeltas, engine: int) -> StepDeltas:
    """The same deltas, with numbers of choices that are unique over engines; `engine` is its number."""
    first = engine * _NUMBERS_OF_ONE
    if not first:
        return deltas
    parts: dict[str, Any] = {
        name: tuple([replace(part, number=part.number + first) for part in getattr(deltas, name)]) for name in _LISTED
    }
    for name in _LOGPROBS:
        parts[name] = tuple([replace(part, numbers=_added(part.numbers, first)) for part in getattr(deltas, name)])
    return replace(deltas, numbers=_added(deltas.numbers, first), **parts)


def _indices(columns: StepDeltas | StepLogprobs, choices: Collection[int]) -> list[int]:
    """Where in columns the tokens of some choices are."""
    return [at for at, number in enumerate(columns.number_list()) if number in choices]


def _picked(column: bytes, kind: type[np.integer[Any]], indices: list[int]) -> bytes:
    return np.frombuffer(column, kind)[indices].tobytes()


def _added(numbers: bytes, first: int) -> bytes:
    return (np.frombuffer(numbers, np.int64) + first).tobytes()

"""Shares of a step's deltas: those of some of its choices, or the same with other numbers.

What walks through every part of `StepDeltas` between `GrowingDeltas`, which makes them, and their readers stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    numbers, counts = np.frombuffer(deltas.numbers, np.int64), np.frombuffer(deltas.counts, np.int32)
    tokens = mine = _are_among(numbers, choices)
    if len(counts):
        tokens, counts = np.repeat(mine, counts), counts[mine]
    parts: dict[str, Any] = {
        name: tuple([part for part in getattr(deltas, name) if part.number in choices]) for name in _LISTED
    }
    for name in _LOGPROBS:
        shares = [_part_of(part, choices) for part in getattr(deltas, name)]
        parts[name] = tuple([share for share in shares if share.numbers])
    return StepDeltas(
        deltas.produced_s,
        numbers=numbers[mine].tobytes(),
        counts=counts.tobytes(),
        token_ids=np.frombuffer(deltas.token_ids, np.int32)[tokens].tobytes(),
        **parts,
    )


def apart(deltas: StepDeltas) -> Iterator[tuple[int, StepDeltas]]:
    """The same deltas, each choice's with its number, for a step whose deltas are too large for one message."""
    for number in named_numbers(deltas):
        yield number, share_of(deltas, {number})


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


def _are_among(numbers: NDArray[np.int64], choices: Collection[int]) -> NDArray[np.bool_]:
    return np.array([number in choices for number in numbers.tolist()], np.bool_)


def _part_of(part: StepLogprobs, choices: Collection[int]) -> StepLogprobs:
    numbers = np.frombuffer(part.numbers, np.int64)
    mine = _are_among(numbers, choices)
    return StepLogprobs(numbers[mine].tobytes(), part.entries.picked(mine.nonzero()[0].tolist()))


def _added(numbers: bytes, first: int) -> bytes:
    return (np.frombuffer(numbers, np.int64) + first).tobytes()

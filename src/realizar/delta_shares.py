"""Shares of a step's deltas: those of some of its choices, or the same with other numbers.

What walks through every part of `StepDeltas` between `GrowingDeltas`, which makes them, and their readers stands here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.logprob_columns import LogprobColumns
from realizar.step_deltas import StepDeltas, StepLogprobs

_Logprobs: TypeAlias = tuple[StepLogprobs, ...]

_NUMBERS_OF_ONE = 1 << 40  # far more than one engine has choices


def named_numbers(deltas: StepDeltas) -> list[int]:
    numbers = deltas.number_list()
    for columns in (*deltas.logprobs, *deltas.prompt_logprobs):
        numbers += columns.number_list()
    for listed in (deltas.starts, deltas.snapshots, deltas.ends, deltas.failures):
        numbers += [part.number for part in listed]
    return list(dict.fromkeys(numbers))


def share_of(deltas: StepDeltas, choices: Collection[int]) -> StepDeltas:
    numbers, counts = np.frombuffer(deltas.numbers, np.int64), np.frombuffer(deltas.counts, np.int32)
    tokens = mine = _are_among(numbers, choices)
    if len(counts):
        tokens, counts = np.repeat(mine, counts), counts[mine]
    return StepDeltas(
        produced_s=deltas.produced_s,
        numbers=numbers[mine].tobytes(),
        counts=counts.tobytes(),
        token_ids=np.frombuffer(deltas.token_ids, np.int32)[tokens].tobytes(),
        starts=tuple([part for part in deltas.starts if part.number in choices]),
        snapshots=tuple([part for part in deltas.snapshots if part.number in choices]),
        logprobs=_logprobs_of(deltas.logprobs, choices),
        prompt_logprobs=_logprobs_of(deltas.prompt_logprobs, choices),
        ends=tuple([part for part in deltas.ends if part.number in choices]),
        failures=tuple([part for part in deltas.failures if part.number in choices]),
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
    return StepDeltas(
        produced_s=deltas.produced_s,
        numbers=_added(deltas.numbers, first),
        counts=deltas.counts,
        token_ids=deltas.token_ids,
        starts=tuple([replace(each, number=each.number + first) for each in deltas.starts]),
        snapshots=tuple([replace(each, number=each.number + first) for each in deltas.snapshots]),
        logprobs=_logprobs_from(deltas.logprobs, first),
        prompt_logprobs=_logprobs_from(deltas.prompt_logprobs, first),
        ends=tuple([replace(each, number=each.number + first) for each in deltas.ends]),
        failures=tuple([replace(each, number=each.number + first) for each in deltas.failures]),
    )


def _are_among(numbers: NDArray[np.int64], choices: Collection[int]) -> NDArray[np.bool_]:
    return np.array([number in choices for number in numbers.tolist()], np.bool_)


def _logprobs_of(parts: _Logprobs, choices: Collection[int]) -> _Logprobs:
    shares = [_part_of(part, choices) for part in parts]
    return tuple([share for share in shares if share.numbers])


def _part_of(part: StepLogprobs, choices: Collection[int]) -> StepLogprobs:
    numbers, entries = np.frombuffer(part.numbers, np.int64), part.entries
    mine, width = _are_among(numbers, choices), entries.width
    return StepLogprobs(
        numbers[mine].tobytes(),
        LogprobColumns(
            width,
            np.frombuffer(entries.ids, np.int32).reshape(-1, width)[mine].tobytes(),
            np.frombuffer(entries.values, np.float64).reshape(-1, width)[mine].tobytes(),
            np.frombuffer(entries.ranks, np.int32)[mine].tobytes(),
        ),
    )


def _logprobs_from(parts: _Logprobs, first: int) -> _Logprobs:
    return tuple([StepLogprobs(_added(part.numbers, first), part.entries) for part in parts])


def _added(numbers: bytes, first: int) -> bytes:
    return (np.frombuffer(numbers, np.int64) + first).tobytes()

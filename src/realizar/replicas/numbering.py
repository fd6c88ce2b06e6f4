"""Numbers of choices that are unique over all engines behind one API."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from realizar.step_deltas import StepDeltas, StepLogprobs

_NUMBERS_OF_ONE = 1 << 40  # far more than one engine has choices


def first_number(incarnation: int) -> int:
    """The first number of an engine's choices; engines are counted as they start."""
    return incarnation * _NUMBERS_OF_ONE


def with_numbers_from(deltas: StepDeltas, first: int) -> StepDeltas:
    """The same deltas, with `first` added to the number of every choice."""
    if not first:
        return deltas
    return StepDeltas(
        produced_s=deltas.produced_s,
        numbers=_added(deltas.numbers, first),
        counts=deltas.counts,
        token_ids=deltas.token_ids,
        starts=tuple([replace(each, number=each.number + first) for each in deltas.starts]),
        snapshots=tuple([replace(each, number=each.number + first) for each in deltas.snapshots]),
        logprobs=_of_logprobs(deltas.logprobs, first),
        prompt_logprobs=_of_logprobs(deltas.prompt_logprobs, first),
        ends=tuple([replace(each, number=each.number + first) for each in deltas.ends]),
        failures=tuple([replace(each, number=each.number + first) for each in deltas.failures]),
    )


def _of_logprobs(parts: tuple[StepLogprobs, ...], first: int) -> tuple[StepLogprobs, ...]:
    return tuple([StepLogprobs(_added(part.numbers, first), part.entries) for part in parts])


def _added(numbers: bytes, first: int) -> bytes:
    return (np.frombuffer(numbers, np.int64) + first).tobytes()

"""Hidden states of a model's steps on any backend, and what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from backend_runs import BackendRunner, Request
from random_models import Recipe, random_model
from realizar.backends.base import Backend, GivesHiddenStates
from reference_model import ReferenceModel
from reference_tensors import load_tensors


class HiddenBackend(Backend, GivesHiddenStates, Protocol):
    """A backend whose steps give hidden states."""


def expected_states(recipe: Recipe, token_ids: Sequence[int]) -> list[NDArray[Any]]:
    """The stream after each layer of a recipe's model, and after the final norm, each [tokens, hidden_size]."""
    spec, checkpoint = random_model(recipe)
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    return [*reference.streams(token_ids), reference.hidden(token_ids)]


def take_states(
    runner: BackendRunner[HiddenBackend], request: Request, layers: Sequence[int | None], count: int,
    beside: Sequence[tuple[Request, int]] = (),
) -> list[NDArray[np.float32]]:  # fmt: skip
    """The states of a request's next tokens, which follow those of other requests in one step: one for each layer."""
    runner.step([*beside, (request, count)])
    first = sum(others for _, others in beside)
    return [runner.backend.hidden_states(range(first, first + count), layer) for layer in layers]


def all_states(
    runner: BackendRunner[HiddenBackend], request: Request, layers: Sequence[int | None], chunks: Sequence[int],
    beside: Sequence[Sequence[tuple[Request, int]]] = (),
) -> list[NDArray[np.float32]]:  # fmt: skip
    """The states of a request that is read in chunks, with the requests that are beside each one."""
    others = beside or [()] * len(chunks)
    parts = [take_states(runner, request, layers, count, near) for count, near in zip(chunks, others, strict=True)]
    return [np.concatenate(of_layer) for of_layer in zip(*parts, strict=True)]


def same_bits(found: Sequence[NDArray[np.float32]], expected: Sequence[NDArray[np.float32]]) -> bool:
    """True if no bit of any state differs."""
    pairs = zip(found, expected, strict=True)
    return all(np.array_equal(one.view(np.uint32), other.view(np.uint32)) for one, other in pairs)

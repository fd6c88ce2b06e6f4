"""The figures of one checkpoint on one device."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from architectures import MAX_RELATIVE_ERROR, BuiltCase, DeviceKind, expected_logits
from backend_runs import BackendRunner
from parity_table.checkpoints import Weights, build
from realizar.config import EngineConfig
from realizar.errors import UnsupportedModelError

LENGTHS = (8, 600)
Found = dict[Weights, dict[str, Any] | str]
"""The figures of a row of `CASES` by form, or why there are none."""


@dataclass(frozen=True)
class Figures:
    """What was measured.

    Attributes:
        errors: relative error of the logits of all tokens, by the length of the prompt; a prompt beyond the model's
            context has none.
        batch_equals_alone: True if rows of a random batch in random chunks had the bits that each had alone.
    """

    errors: dict[str, float]
    batch_equals_alone: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(name: str, weights: Weights, device: DeviceKind) -> Figures:
    """Compare with transformers in float32. F32 weights beyond MAX_RELATIVE_ERROR at any token are an error."""
    with tempfile.TemporaryDirectory() as folder:
        built = build(name, weights, Path(folder), max(LENGTHS))
        context = built.context_length or built.model.config.get_text_config().max_position_embeddings
        errors = {}
        runner = _load(built, device, batch_invariant=False)
        for length in LENGTHS:
            if first_length(built) <= length <= context:
                part = built._replace(token_ids=built.token_ids[:length])
                errors[str(length)] = _error(part, runner.logits(part.token_ids), weights)
        runner.close()
        runner = _load(built, device, batch_invariant=True)
        equals = _batch_equals_alone(runner, built.token_ids[: min(context, max(LENGTHS))])
        runner.close()
    return Figures(errors, equals)


def measure_forms(name: str, device: DeviceKind, forms: Sequence[Weights]) -> Found:
    """The figures of a row of `CASES` in some forms. A model that a backend refuses has the reason in their place."""
    found: Found = {}
    for form in forms:
        try:
            found[form] = measure(name, form, device).as_json()
        except UnsupportedModelError as error:
            found[form] = {"refused": str(error)}
        except AssertionError as error:
            found[form] = str(error)
    return found


def first_length(built: BuiltCase) -> int:
    """The shortest prompt that is compared: transformers takes longrope's other table for shorter ones."""
    rope = built.model.config.get_text_config().rope_parameters
    opened_long = built.context_length is None and rope.get("rope_type") == "longrope"
    return int(rope["original_max_position_embeddings"]) + 1 if opened_long else 1


def _load(built: BuiltCase, device: DeviceKind, *, batch_invariant: bool) -> BackendRunner[Any]:
    config = EngineConfig(block_size=32, max_step_tokens=640, max_running=4, kv_cache_bytes=64 << 20)
    if device == "cpu":
        load = importlib.import_module("cpu_runs").load_runner
    else:  # needs torch with CUDA and Triton
        load = importlib.import_module("backends.cuda.cuda_runs").load_gpu_runner
        config = replace(config, batch_invariant=batch_invariant, graphs=False)
    runner: BackendRunner[Any] = load(built.path, config, built.context_length)
    return runner


def _error(built: BuiltCase, found: NDArray[np.float32], weights: Weights) -> float:
    expected = expected_logits(built)
    by_token = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    if weights.startswith("F32") and by_token.max() > MAX_RELATIVE_ERROR:
        raise AssertionError(f"{built.path.name}: relative error {by_token.max():.2e} at token {by_token.argmax()}")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _batch_equals_alone(runner: BackendRunner[Any], token_ids: list[int]) -> bool:
    """Rows of three lengths over blocks of their own, in chunks drawn at random."""
    rng = np.random.default_rng(5)
    prompts = [token_ids[: max(1, len(token_ids) // divisor)] for divisor in (1, 5, 40)]
    alone = [runner.logits(ids) for ids in prompts]
    requests, first = [], 0
    for row, ids in enumerate(prompts):
        requests.append(runner.request(row, ids, rng, first))
        first += len(requests[-1].blocks[0])
    while left := [request for request in requests if request.computed < len(request.token_ids)]:
        chosen = [left[i] for i in rng.permutation(len(left))]
        runner.step([(r, int(min(len(r.token_ids) - r.computed, rng.choice([1, 2, 5, 33, 100])))) for r in chosen])
    return all(
        np.array_equal(request.values().view(np.uint32), values.view(np.uint32))
        for request, values in zip(requests, alone, strict=True)
    )

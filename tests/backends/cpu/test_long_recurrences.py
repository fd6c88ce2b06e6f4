"""Gated delta nets on the CPU over long sequences: logits in any chunks, and states, against float64."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from architectures import MAX_RELATIVE_ERROR, build_case
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.codegen.recurrence import head_lanes, run_columns
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.state.sizes import convolution_floats
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.mixers import GatedDeltaNet
from realizar.models.registry import build_spec
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors

STEP_TOKENS, DECODED = 512, 8


def live_state(runner: Runner, layer: int) -> NDArray[np.float32]:
    """The state of a layer's value heads after the tokens of row 0: float32 [value heads, key_size, value_size]."""
    mixer = runner.spec.layers[layer].mixer
    assert isinstance(mixer, GatedDeltaNet)
    columns = run_columns(mixer.value_size, head_lanes((mixer.key_size, mixer.value_size), select().lanes))
    shape = mixer.num_value_heads, mixer.value_size // columns, mixer.key_size, columns
    at = runner.backend.model.states.state_address(layer) + 4 * convolution_floats(mixer)
    runs = np.ctypeslib.as_array((ctypes.c_float * math.prod(shape)).from_address(at)).reshape(shape)
    return runs.transpose(0, 2, 1, 3).reshape(mixer.num_value_heads, mixer.key_size, -1)


def check_states(runner: Runner, reference: ReferenceModel, tokens: list[int]) -> None:
    """States after all tokens, read in chunks by both."""
    request, state = runner.request(0, tokens), State()
    for start in range(0, len(tokens), STEP_TOKENS):
        chunk = tokens[start : start + STEP_TOKENS]
        runner.step([(request, len(chunk))])
        reference.hidden(chunk, state)
    for layer in runner.spec.state_layers():
        expected = state[layer][1]
        error = np.linalg.norm(live_state(runner, layer) - expected) / np.linalg.norm(expected)
        assert error <= MAX_RELATIVE_ERROR, f"layer {layer}: {error:.2e}"


def test_states_after_1500_tokens() -> None:
    recipe = Recipe(windows=(None,) * 2, recurrent=("delta",), weights="F32", context_length=2048)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(threads=2, max_running=1, max_step_tokens=STEP_TOKENS)
    runner = Runner(spec, checkpoint, config)
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    check_states(runner, reference, list(random_tokens(recipe, 1500)))
    runner.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen35", "qwen35-two", "qwen35moe", "qwen3next"])
def test_logits_of_5000_tokens_and_states_after_10000(name: str, tmp_path: Path) -> None:
    """Whole, in chunks of 1, 7, 64 and 512 tokens, and gone on with by single tokens."""
    pytest.importorskip("torch", reason="rows are made by transformers, which needs torch")
    pytest.importorskip("transformers", reason="rows are made by transformers")
    checkpoint = open_checkpoint(build_case(name, tmp_path, "safetensors").path)
    spec = replace(build_spec(checkpoint), context_length=10_240)
    config = EngineConfig(threads=2, max_running=1, max_step_tokens=5000)
    runner = Runner(spec, checkpoint, config)
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, 10_000).tolist()
    state, prompt = State(), tokens[:5000]
    expected = np.concatenate([reference.logits(prompt[at : at + 500], state) for at in range(0, 5000, 500)])
    whole = runner.logits(prompt)
    errors = np.linalg.norm(whole - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert errors.max() <= MAX_RELATIVE_ERROR
    for size in (512, 64, 7, 1):
        last = 5000 - DECODED
        chunks = [min(size, last - start) for start in range(0, last, size)]
        np.testing.assert_array_equal(runner.logits(prompt, chunks), whole)
    check_states(runner, reference, tokens)
    runner.close()

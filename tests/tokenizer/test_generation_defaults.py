"""Sampling settings that a model recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.generation_defaults import default_sampling, generation_defaults


def gguf(**values: Any) -> Checkpoint:
    return Checkpoint(Path("m.gguf"), "gguf", {f"general.sampling.{key}": value for key, value in values.items()}, {})


def folder(**values: Any) -> Checkpoint:
    return Checkpoint(Path("m"), "safetensors", {"generation_config": values}, {})


def test_gguf_names() -> None:
    given = gguf(temp=0.5, top_k=20, top_p=0.75, min_p=0.25, penalty_repeat=1.5, mirostat=2, xtc_threshold=0.25)
    defaults = generation_defaults(given)
    assert defaults == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "mirostat": 2,
        "xtc_threshold": 0.25,
    }
    assert SamplingParams(**defaults).temperature == 0.5  # type: ignore[arg-type]


def test_json_names() -> None:
    assert generation_defaults(folder(temperature=0.6, top_k=20, do_sample=True, eos_token_id=3)) == {
        "temperature": 0.6,
        "top_k": 20,
    }
    assert generation_defaults(folder(temperature=0.6, do_sample=False)) == {"temperature": 0.0}
    assert generation_defaults(folder()) == {}
    assert generation_defaults(Checkpoint(Path("m"), "safetensors", {}, {})) == {}


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (gguf(top_p=2.0), "m.gguf: key 'general.sampling.top_p': 2.0 is out of range"),
        (gguf(temp="hot"), "m.gguf: key 'general.sampling.temp': is 'hot', which is not a number"),
        (gguf(mirostat=1), "m.gguf: key 'general.sampling.mirostat': 1 is out of range"),
        (folder(min_p=float("nan")), "m/generation_config.json: key 'min_p': nan is out of range"),
        (gguf(top_k=float("inf")), "m.gguf: key 'general.sampling.top_k': inf is out of range"),
        (gguf(mirostat=float("nan")), "m.gguf: key 'general.sampling.mirostat': nan is out of range"),
        (folder(temperature=10**400), f"m/generation_config.json: key 'temperature': {10**400} is out of range"),
        (folder(top_k=True), "m/generation_config.json: key 'top_k': is True, which is not a number"),
    ],
)
def test_values_out_of_range(checkpoint: Checkpoint, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        generation_defaults(checkpoint)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("checkpoint", "wanted"),
    [
        (gguf(), (0.8, 40, 0.95, 0.05)),
        (gguf(temp=0.5, min_p=0.0), (0.5, 40, 0.95, 0.0)),
        (folder(temperature=1.0, top_p=1.0), (1.0, 40, 1.0, 0.05)),
        (folder(do_sample=False), (0.0, 40, 0.95, 0.05)),
    ],
)
def test_what_the_files_leave_open_is_built_in(checkpoint: Checkpoint, wanted: tuple[float, ...]) -> None:
    found = default_sampling(checkpoint)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == wanted
    neutral = SamplingParams()
    assert (neutral.temperature, neutral.top_k, neutral.top_p, neutral.min_p) == (1.0, 0, 1.0, 0.0)

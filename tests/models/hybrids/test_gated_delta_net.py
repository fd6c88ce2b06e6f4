"""The reference model's gated delta net against that of transformers, whole and in chunks."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from realizar.models.mixers import GatedDeltaNet
from realizar.models.parts import Linear, Norm
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel, State

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HIDDEN, KEY_HEADS, SIZE = 48, 2, 16


def _oracle(value_heads: int) -> tuple[Any, dict[str, NDArray[np.float32]]]:
    """A layer of transformers with random weights, and these."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=SIZE,
        linear_value_head_dim=SIZE,
        num_hidden_layers=1,
    )
    torch.manual_seed(value_heads)
    layer = Qwen3_5GatedDeltaNet(config, 0).float().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer, {name: value.detach().numpy() for name, value in layer.state_dict().items()}


def _part(tensors: dict[str, NDArray[np.float32]], value_heads: int) -> GatedDeltaNet:
    linears = {
        name: Linear(name, *tensors[name].shape) for name in ("q", "k", "v", "z", "beta", "decay", "out")
    }  # fmt: skip
    return GatedDeltaNet(
        num_key_heads=KEY_HEADS,
        num_value_heads=value_heads,
        key_size=SIZE,
        value_size=SIZE,
        length=4,
        kernel="kernel",
        decay_bias="decay_bias",
        rate="rate",
        norm=Norm("rms", 1e-6, "norm"),
        rate_is_log=True,
        **linears,
    )


def _tensors(stored: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    size = KEY_HEADS * SIZE
    qkv = stored["in_proj_qkv.weight"]
    return {
        "q": qkv[:size],
        "k": qkv[size : 2 * size],
        "v": qkv[2 * size :],
        "z": stored["in_proj_z.weight"],
        "beta": stored["in_proj_b.weight"],
        "decay": stored["in_proj_a.weight"],
        "kernel": stored["conv1d.weight"][:, 0],
        "decay_bias": stored["dt_bias"],
        "rate": stored["A_log"],
        "norm": stored["norm.weight"],
        "out": stored["out_proj.weight"],
    }


def _model(tensors: dict[str, NDArray[np.float32]]) -> ReferenceModel:
    """A model of which only the mixer is run."""
    return ReferenceModel(cast("ModelSpec", types.SimpleNamespace(tensors=tensors)), tensors)


def _output(model: ReferenceModel, part: GatedDeltaNet, x: NDArray[np.float32], state: State) -> NDArray[np.float32]:
    mixed, state[0] = model.mixer(part, x, state.get(0))
    return cast("NDArray[np.float32]", mixed)


@pytest.mark.parametrize("value_heads", [2, 4, 6])
def test_the_recurrence_is_that_of_transformers(value_heads: int) -> None:
    layer, stored = _oracle(value_heads)
    x = np.random.default_rng(1).standard_normal((100, HIDDEN)).astype(np.float32)
    with torch.no_grad():
        expected = layer(torch.from_numpy(x)[None])[0].numpy()
    tensors = _tensors(stored)
    part = _part(tensors, value_heads)
    model = _model(tensors)
    whole = _output(model, part, x, {})
    assert np.abs(whole - expected).max() <= 1e-5 * np.abs(expected).max()
    for size in (1, 7, 64):
        state: State = {}
        chunks = [_output(model, part, x[at : at + size], state) for at in range(0, len(x), size)]
        assert np.abs(np.concatenate(chunks) - whole).max() <= 1e-5 * np.abs(whole).max()


def test_tiled_value_heads_read_the_key_heads_in_turn() -> None:
    """The same numbers as grouped value heads whose matrices, gates and kernel are in the other order."""
    _, stored = _oracle(6)
    tensors = _tensors(stored)
    part = _part(tensors, 6)
    order = np.array([head * 3 + turn for turn in range(3) for head in range(KEY_HEADS)])  # tiled place to grouped head
    rows = (order[:, None] * SIZE + np.arange(SIZE)).ravel()
    keys = 2 * KEY_HEADS * SIZE
    moved = dict(tensors)
    for name in ("v", "z"):
        moved[name] = tensors[name][rows]
    for name in ("beta", "decay", "decay_bias", "rate"):
        moved[name] = tensors[name][order]
    moved["kernel"] = np.concatenate([tensors["kernel"][:keys], tensors["kernel"][keys:][rows]])
    moved["out"] = tensors["out"][:, rows]
    tiled = dataclasses.replace(part, tiled=True)
    x = np.random.default_rng(2).standard_normal((20, HIDDEN)).astype(np.float32)
    grouped = _output(_model(tensors), part, x, {})
    assert np.abs(_output(_model(moved), tiled, x, {}) - grouped).max() <= 1e-5 * np.abs(grouped).max()

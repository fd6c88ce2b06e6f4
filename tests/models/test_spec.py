"""The spec's own sums: what a model with layers of every kind has of attention, matrices, vectors and caches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hybrid_spec import hybrid_spec
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CheckpointError
from realizar.models.check_tensors import check_tensors
from realizar.models.spec import CacheGroup
from realizar.models.tensor_source import TensorSource

PATH = Path("experts.safetensors")


def test_cache_groups_have_the_layers_that_keep_the_same_tokens() -> None:
    """Layer 2 keeps a state, and layer 4 has no mixer."""
    assert hybrid_spec().cache_groups() == (CacheGroup(None, (0, 3)), CacheGroup(5, (1,)))
    assert hybrid_spec().state_layers() == (2,)


def test_attentions_and_dense_feed_forwards_with_their_layers() -> None:
    spec = hybrid_spec()
    assert [(index, part.window) for index, part in spec.attentions()] == [(0, None), (1, 5), (3, None)]
    assert [(index, part.up.weight) for index, part in spec.feed_forwards()] == [(0, "0.up.weight"), (2, "2.up.weight")]


def test_every_tensor_is_a_matrix_a_vector_or_one_of_the_experts() -> None:
    spec = hybrid_spec()
    linears = [linear.weight for linear in spec.linears()]
    assert linears == [
        *(f"0.{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(f"1.{name}.weight" for name in ("q", "k", "v", "o", "router")),
        *(f"2.{name}.weight" for name in ("in", "out", "gate", "up", "down")),
        *(f"3.{name}.weight" for name in ("q", "k", "v", "o")),
        "4.router.weight",
        "head.weight",
    ]
    experts = [f"{layer}.{name}.weight" for layer in (1, 4) for name in ("gate", "up", "down")]
    rest = set(spec.tensors) - {*linears, *experts, spec.embedding}
    assert sorted(spec.vectors()) == sorted(rest)
    assert all(
        spec.tensors[linear.weight].shape == (linear.out_features, linear.in_features) for linear in spec.linears()
    )


def test_experts_that_lie_apart_are_compared_one_by_one() -> None:
    """A stack has one checkpoint tensor for each index of its first dimension, and each must be there."""
    names = tuple(f"experts.{index}" for index in range(3))
    spec = dataclasses.replace(hybrid_spec(), tensors={"stack": TensorSource(names[0], (3, 4, 2), stack=names)})
    stored = {name: StoredTensor(name, GGMLType.F32, (4, 2), np.zeros(32, np.uint8), PATH, 0) for name in names}
    check_tensors(spec, Checkpoint(PATH, "safetensors", {}, stored))
    with pytest.raises(CheckpointError, match=r"missing experts\.2"):
        check_tensors(spec, Checkpoint(PATH, "safetensors", {}, {name: stored[name] for name in names[:2]}))
    wrong = {**stored, names[1]: dataclasses.replace(stored[names[1]], shape=(2, 4))}
    with pytest.raises(CheckpointError, match=r"misshaped experts\.1 \(2, 4\) in place of \(4, 2\)"):
        check_tensors(spec, Checkpoint(PATH, "safetensors", {}, wrong))

"""Shared experts that are the last of the experts' stacks: which can be, and where their matrices lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from quantization.stored_checkpoints import Stored, write_model  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.weights import pack_raw  # noqa: E402
from realizar.backends.cuda.weights.experts import ExpertLoader, ExpertsPlan, PackedExperts  # noqa: E402
from realizar.backends.cuda.weights.pack_raw import Packer, pack_by_threads  # noqa: E402
from realizar.backends.weight_tensors import WeightTensors  # noqa: E402
from realizar.checkpoint.open import open_checkpoint  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from realizar.models.spec import Experts  # noqa: E402
from realizar.quantization.float_tensors import e4m3_layout  # noqa: E402

RECIPE = Recipe(
    hidden_size=64, feed_forward_size=128, windows=(None,), weights="Q8_0", experts=3, per_token=2,
    parts=("shared", "shared_gate"),
)  # fmt: skip
DEVICE = torch.device("cpu")


class HostPacker(Packer):
    """A card's packer without a card: what it uploads stays on the host."""

    def __init__(self) -> None:
        self.device, self._repacks = DEVICE, True

    def _upload(self, runs: Sequence[np.ndarray], stream: object) -> tuple[torch.Tensor, Any]:
        return torch.from_numpy(np.concatenate(runs)), SimpleNamespace(record=lambda _: None)


class ThreadPacker:
    """Packs on the host."""

    def pack(self, parts: object, into: object) -> object:
        return pack_by_threads(parts, DEVICE, into)  # type: ignore[arg-type]


def mixture(recipe: Recipe) -> tuple[Experts, WeightTensors]:
    spec, checkpoint = random_model(recipe)
    part = spec.layers[0].feed_forward
    assert isinstance(part, Experts)
    return part, WeightTensors(spec, checkpoint)


def is_stacked(part: Experts, tensors: WeightTensors) -> bool:
    return bool(ExpertsPlan.of(part, tensors, packs=True, stacks_shared=True).joined)


@pytest.mark.parametrize(
    ("recipe", "fits"),
    [
        (RECIPE, True),
        (replace(RECIPE, parts=("shared",), weights="Q4_0"), True),
        (replace(RECIPE, parts=()), False),
        (replace(RECIPE, down_weights="Q4_0"), False),
        (replace(RECIPE, weights="F16"), False),
        (replace(RECIPE, feed_forward_size=96), False),
        (replace(RECIPE, parts=("shared", "biases")), False),
        (replace(RECIPE, parts=("shared", "own_norms")), False),
    ],
)
def test_experts_of_one_kind_join(recipe: Recipe, fits: bool) -> None:
    part, tensors = mixture(recipe)
    assert is_stacked(part, tensors) is fits
    if fits:
        assert part.shared is not None
        other = replace(part.shared, activation="gelu")
        assert not is_stacked(replace(part, shared=other), tensors)
        narrow = replace(part.shared, up=replace(part.shared.up, out_features=64))
        assert not is_stacked(replace(part, shared=narrow), tensors)


def test_experts_of_eight_bit_floats_join(monkeypatch: pytest.MonkeyPatch) -> None:
    part, tensors = mixture(RECIPE)
    monkeypatch.setattr(tensors, "layout", lambda _: e4m3_layout(64))
    assert is_stacked(part, tensors)


def test_its_matrices_lie_behind_the_others() -> None:
    part, tensors = mixture(RECIPE)
    assert part.shared is not None
    assert part.shared.gate is not None
    done: list[int] = []
    loader = ExpertLoader(tensors, DEVICE, ThreadPacker(), done.append)  # type: ignore[arg-type]
    plain, stacked = (
        loader.load(part, ExpertsPlan.of(part, tensors, packs=True, stacks_shared=shared)) for shared in (False, True)
    )
    assert sum(done) == sum(
        tensors.size_bytes(one.weight) for one in (*part.expert_linears() * 2, *part.shared.linears())
    )
    assert (plain.shared, plain.count, plain.per_token) == (0, 3, 2)
    assert (stacked.shared, stacked.count, stacked.per_token) == (1, 4, 3)
    own = (part.shared.gate, part.shared.up), (part.shared.down,)
    for before, stack, linears in zip(plain.stacks, stacked.stacks, own, strict=True):
        assert isinstance(before, PackedExperts)
        assert isinstance(stack, PackedExperts)
        assert (stack.count, stack.routed, stack.shared) == (4, 3, 1)
        alone = pack_by_threads([tensors.matrix(one.weight) for one in linears], DEVICE, interleaved=len(linears) == 2)
        assert torch.equal(stack.weights, torch.cat([before.weights, alone.weights]))
        assert torch.equal(stack.block_scales, torch.cat([before.block_scales, alone.block_scales]))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_of_eight_bit_floats_are_packed_as_threads_pack_them(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several pieces, each of a part of the stack."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(pack_raw, "_PIECE_BYTES", 1 << 14)
    write_model(tmp_path, Stored("fp8", scale="float32"), mixture=True, shared=shared)
    checkpoint = open_checkpoint(tmp_path)
    spec = build_spec(checkpoint)
    part, tensors = spec.layers[1].feed_forward, WeightTensors(spec, checkpoint)
    assert isinstance(part, Experts)
    plan = ExpertsPlan.of(part, tensors, packs=True, stacks_shared=True)
    found, expected = (
        ExpertLoader(tensors, DEVICE, packer, lambda _: None).load(part, plan)  # type: ignore[arg-type]
        for packer in (HostPacker(), ThreadPacker())
    )
    assert len(found.stacks) == 2
    for one, other in zip(found.stacks, expected.stacks, strict=True):
        assert isinstance(one, PackedExperts)
        assert isinstance(other, PackedExperts)
        assert torch.equal(one.weights, other.weights)
        assert torch.equal(one.block_scales, other.block_scales)

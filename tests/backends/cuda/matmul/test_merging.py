"""The epilogues that matmuls may have are those that the blocks of the program chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.weights.fake_card import FakeCard  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.matmul import linears  # noqa: E402
from realizar.backends.cuda.weights.load import Weights  # noqa: E402
from realizar.backends.program import Program, build_program  # noqa: E402


def declined(program: Program) -> Program:
    """The program whose first layer declines every fusion."""
    blocks = [
        block
        if block.layer
        else replace(block, inputs=replace(block.inputs, gated=None), join=replace(block.join, adds_directly=False))
        for block in program.blocks
    ]
    return replace(program, blocks=tuple(blocks))


def test_a_block_that_declines_fusion_gets_no_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint = random_model(Recipe(64, 2, 1, 64, 128, 64, (None,) * 2, "Q8_0"))
    program = declined(build_program(spec))
    made: list[tuple[Any, bool]] = []

    def record(
        _matrices: Any, _bias: Any, _device: Any, _matmuls: Any, activation: Any, adds: bool, *_others: bool
    ) -> None:
        made.append((activation, adds))

    monkeypatch.setattr(linears, "MergedLinear", record)
    monkeypatch.setattr(linears, "PackedMatrix", object)
    device: Any = FakeCard(torch.device("cpu"), "fake", (9, 0), 1, 1, 1 << 30)
    weights = Weights(spec, program, checkpoint, device)
    weights.groups = {tuple(one.weight for one in group): () for group in program.matmuls()}
    merger = linears.Merger(program, weights, device, None)
    for group in program.block_matmuls():
        merger.merge(group)
    assert made == [
        *[(None, False)] * 4,
        *[(None, False), (None, True), ("silu", False), (None, True)],
    ]

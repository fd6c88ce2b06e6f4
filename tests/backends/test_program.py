"""A model's blocks: their order, what each adds to the residual stream, and what may be fused."""

from __future__ import annotations

from dataclasses import replace

from hybrid_spec import hybrid_spec
from realizar.backends.program import (
    AttentionBlock,
    ExpertsBlock,
    FeedForwardBlock,
    Inputs,
    ShortConvolutionBlock,
    build_program,
)
from realizar.models.parts import Linear
from realizar.models.spec import Layer, ModelSpec


def names(linears: tuple[Linear, ...]) -> str:
    return " ".join(linear.weight.removesuffix(".weight") for linear in linears)


def test_a_block_for_each_mixer_and_each_feed_forward() -> None:
    blocks = build_program(hybrid_spec()).blocks
    assert [(type(block), block.layer) for block in blocks] == [
        (AttentionBlock, 0),
        (FeedForwardBlock, 0),
        (AttentionBlock, 1),
        (ExpertsBlock, 1),
        (ShortConvolutionBlock, 2),
        (FeedForwardBlock, 2),
        (AttentionBlock, 3),
        (ExpertsBlock, 4),
    ]


def test_shared_inputs_and_residual_adds() -> None:
    spec = hybrid_spec()
    program = build_program(spec)
    assert [names(block.inputs.linears) for block in program.blocks] == [
        "0.q 0.k 0.v", "0.gate 0.up", "1.q 1.k 1.v", "1.router", "2.in", "2.gate 2.up", "3.q 3.k 3.v", "4.router",
    ]  # fmt: skip
    norms = [block.inputs.norm.weight if block.inputs.norm else None for block in program.blocks]
    assert norms == [
        f"{name}.weight" for name in ("0.input", "0.pre", "1.input", "1.pre", "2.input", "2.pre", "3.input", "4.pre")
    ]
    residual_adds = [names((block.join.linear,)) if block.join.linear else None for block in program.blocks]
    assert residual_adds == ["0.o", "0.down", "1.o", None, "2.out", "2.down", "3.o", None]
    assert [block.join.scale for block in program.blocks] == [1.0] * 6 + [0.5, 1.0]
    assert (program.tail.norm, program.tail.head) == (spec.final_norm, spec.head)


def test_a_matmul_may_add_to_the_stream_unless_a_norm_or_nothing_is_between() -> None:
    """Layer 0 has a norm after attention; experts have no last matrix of their own."""
    blocks = build_program(hybrid_spec()).blocks
    assert [block.join.adds_directly for block in blocks] == [False, True, True, False, True, True, True, False]


def test_the_activation_may_be_the_epilogue_of_gate_and_up_alone() -> None:
    spec = hybrid_spec()
    gated = [block.inputs.gated for block in build_program(spec).blocks]
    (_, first), (_, second) = spec.feed_forwards()
    assert gated == [None, first, None, None, None, second, None, None]


def test_a_norms_scale_may_be_folded_into_its_consumers_where_a_matmul_adds_before_an_rms_norm() -> None:
    """A norm after the matmul, a LayerNorm, a norm with a bias, and none at all each forbid it; so does the end.

    What experts add, as in layer 1, may begin a norm as well.
    """
    spec = hybrid_spec()
    folds = [block.join.folds_next_norm for block in build_program(spec).blocks]
    assert folds == [False, True, True, True, True, True, True, False]
    norm = spec.layers[3].input_norm
    assert norm is not None
    for other in (replace(norm, kind="layer"), replace(norm, bias="bias"), None):
        layers = (*spec.layers[:3], replace(spec.layers[3], input_norm=other), spec.layers[4])
        folds = [block.join.folds_next_norm for block in build_program(replace(spec, layers=layers)).blocks]
        assert folds == [False, True, True, True, True, False, True, False]
    last = build_program(replace(spec, layers=spec.layers[3:4])).blocks[-1]
    assert last.join.adds_directly
    assert not last.join.folds_next_norm


def test_a_join_knows_what_reads_the_stream_next() -> None:
    blocks = build_program(hybrid_spec()).blocks
    following: list[Inputs | None] = [*(block.inputs for block in blocks[1:]), None]
    assert [block.join.next for block in blocks] == following


def test_matmuls_are_every_matrix_once_in_the_order_of_the_spec() -> None:
    spec = hybrid_spec()
    program = build_program(spec)
    assert tuple(linear for group in program.matmuls() for linear in group) == spec.linears()
    assert [names(group) for group in program.block_matmuls()][:5] == [
        "0.q 0.k 0.v",
        "0.o",
        "0.gate 0.up",
        "0.down",
        "1.q 1.k 1.v",
    ]
    assert program.tail.matmuls() == [(spec.head,)]


def test_a_feed_forward_without_gate_has_one_input_and_no_layers_no_block() -> None:
    spec = hybrid_spec()
    _, dense = spec.feed_forwards()[0]
    bare: ModelSpec = replace(spec, layers=(Layer(None, replace(dense, gate=None)), Layer(None, None)))
    (block,) = build_program(bare).blocks
    assert names(block.inputs.linears) == "0.up"
    assert block.inputs.gated is None
    assert block.inputs.norm is None
    assert block.join.next is None

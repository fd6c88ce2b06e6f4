"""Models cut for ranks: the sums of all ranks are the whole model's, and what can't be cut is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hybrid_spec import hybrid_spec
from models.ranks.sharded_reference import sharded_logits
from random_models import Recipe, random_model, random_tokens
from realizar.backends.program import AttentionBlock, FeedForwardBlock, InputGateBlock, build_program
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Linear, Share
from realizar.models.shard import shard
from realizar.models.spec import ExpertLinear, ModelSpec
from reference_model import ReferenceModel
from reference_tensors import load_tensor, load_tensors

_PLAIN = Recipe(
    16, 24, 24, hidden_size=64, feed_forward_size=48, vocab_size=101, weights="F32", key_size=8, value_size=16
)
RECIPES = {
    "dense": (replace(_PLAIN, parts=("biases", "layer_norm", "sinks", "soft_cap", "post_norms", "qk_norm")), (2, 3, 6)),
    "few-kv-heads": (replace(_PLAIN, num_kv_heads=2, parts=("output_gate", "growth", "ungated")), (2, 4, 8)),
    "norms-of-tokens": (replace(_PLAIN, num_kv_heads=3, parts=("token_norm", "biases")), (3,)),
    "copied-norms-of-tokens": (replace(_PLAIN, num_kv_heads=1, parts=("token_norm",)), (3, 4)),
    "values-are-keys": (
        replace(
            _PLAIN, windows=(None, 9, 9), full_head_size=32, input_size=16, sources=(None, None, 1),
            parts=("k_is_v", "value_norm", "output_scale", "qk_norm"),
        ),
        (2, 3),
    ),
    "experts": (
        replace(
            _PLAIN, experts=4,
            parts=("expert_biases", "clamped", "shared", "shared_gate", "expert_scales", "sigmoid", "selection_bias"),
        ),
        (2, 4, 8),
    ),
    "experts-of-two-matrices": (replace(_PLAIN, experts=8, parts=("ungated_experts", "groups", "undivided")), (2,)),
    "experts-with-norms": (replace(_PLAIN, experts=4, parts=("shared", "own_norms", "post_norms")), (3,)),
    "delta-nets": (
        replace(
            _PLAIN, windows=(None,) * 3, recurrent=("delta", "convolution"), parts=("biases",), hidden_size=72,
            key_heads=6, value_heads=12,
        ),
        (2, 3, 6),
    ),
    "tiled-delta-nets": (
        replace(_PLAIN, windows=(None,) * 2, recurrent=("delta",), parts=("tiled",), key_heads=4, value_heads=12),
        (2,),
    ),
    "copied-delta-nets": (
        replace(_PLAIN, windows=(None,) * 2, recurrent=("delta",), key_heads=2, value_heads=8), (4, 8),
    ),
    "copied-tiled-delta-nets": (
        replace(_PLAIN, windows=(None,) * 2, recurrent=("delta",), parts=("tiled",), key_heads=2, value_heads=8), (4,),
    ),
}  # fmt: skip


def of_gpus(name: str) -> Recipe:
    """A recipe with sizes that kernels have: heads of delta nets, and layers' own inputs."""
    recipe = RECIPES[name][0]
    return replace(recipe, key_size=16, input_size=recipe.input_size and 32)


CASES = [(name, ranks) for name, (_, counts) in RECIPES.items() for ranks in counts]


def _model(name: str) -> tuple[ModelSpec, Checkpoint]:
    return random_model(RECIPES[name][0])


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_sums_of_ranks_are_the_whole(name: str, ranks: int) -> None:
    (spec, checkpoint), ids = _model(name), random_tokens(RECIPES[name][0], 12)
    whole = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    found = sharded_logits(spec, checkpoint, ranks, ids, np.float64)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_backends_read_the_parts_of_ranks(name: str, ranks: int) -> None:
    """Through sources of weights, all that a rank has and nothing else; and no rank holds much more than its part."""
    spec, checkpoint = _model(name)
    sizes = []
    for rank in range(ranks):
        part = shard(spec, rank, ranks)
        check_tensors(part, checkpoint)
        tensors = WeightTensors(part, checkpoint)
        for matrix in part.matrices():
            expected = load_tensor(part.tensors[matrix.weight], checkpoint)
            assert expected.shape[-2:] == (matrix.out_features, matrix.in_features)
            if isinstance(matrix, Linear):
                np.testing.assert_array_equal(tensors.matrix(matrix.weight).dequantize(), expected)
            else:
                read = [tensors.expert(matrix.weight, each).dequantize() for each in range(matrix.num_experts)]
                np.testing.assert_array_equal(np.stack(read), expected)
            if matrix.bias is not None:
                read_bias = tensors.expert_vectors if isinstance(matrix, ExpertLinear) else tensors.vector
                np.testing.assert_array_equal(
                    read_bias(matrix.bias), load_tensor(part.tensors[matrix.bias], checkpoint)
                )
        for vector in part.vectors():
            expected = load_tensor(part.tensors[vector], checkpoint)
            read_one = tensors.convolution if expected.ndim == 2 else tensors.vector
            np.testing.assert_array_equal(read_one(vector), expected)
        sizes.append(sum(each.out_features * each.in_features for each in part.matrices()))
    assert max(sizes) < 1.5 * sum(each.out_features * each.in_features for each in spec.matrices()) / ranks + 20000


def test_the_sums_are_added_up_where_blocks_return_to_the_stream() -> None:
    spec, _ = _model("values-are-keys")
    program = build_program(shard(spec, 1, 2))
    assert program.share == Share(1, 2)
    for block in program.blocks:
        assert block.join.reduce is not isinstance(block, InputGateBlock)
        assert not (block.join.reduce and block.join.adds_directly)
    assert not any(block.join.reduce for block in build_program(spec).blocks)
    tokens, _ = _model("norms-of-tokens")
    for ranks, reduces in ((1, False), (3, True)):
        blocks = build_program(shard(tokens, 0, ranks)).blocks
        assert {block.reduces_norms for block in blocks if isinstance(block, AttentionBlock)} == {reduces}


def test_ids_need_not_divide_and_one_rank_alone_adds_biases() -> None:
    spec, _ = _model("dense")
    parts = [shard(spec, rank, 8) for rank in range(8)]
    assert [part.head.out_features for part in parts] == [13] * 7 + [10]
    assert [part.first_id for part in parts] == [13 * rank for rank in range(8)]
    for rank, part in enumerate(parts):
        assert (part.vocab_size, part.hidden_size) == (101, 64)
        for block in build_program(part).blocks:
            assert block.join.linear is not None
            assert (block.join.linear.bias is None) is (rank > 0)
            if isinstance(block, FeedForwardBlock):
                assert block.feed_forward.up.bias is not None
    assert "layers.0.down.bias" in parts[1].ignored_tensors


@pytest.mark.parametrize(
    ("change", "ranks", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "layer 0 has 6 heads of queries, which 4 ranks can't share evenly"),
        ({"num_kv_heads": 3}, 2, "layer 0 has 3 heads of keys and values, which 2 ranks can't share evenly"),
        ({"feed_forward_size": 36}, 8, "layer 0 has 36 features of a feed-forward, which 8 ranks can't share evenly"),
        (
            {"feed_forward_size": 36, "experts": 2}, 8,
            "layer 0 has 36 features of an expert, which 8 ranks can't share evenly",
        ),
        (
            {"recurrent": (None, "convolution")}, 3,
            "layer 1 has 64 channels of a convolution, which 3 ranks can't share evenly",
        ),
        (
            {"recurrent": ("delta",), "key_heads": 3, "value_heads": 6}, 2,
            "layer 0 has 3 key heads of a gated delta net, which 2 ranks can't share evenly",
        ),
        (
            {"recurrent": ("delta",), "key_heads": 2, "value_heads": 6}, 4,
            "layer 0 has 6 value heads of a gated delta net, which 4 ranks can't share evenly",
        ),
        ({"vocab_size": 5}, 4, "a vocabulary of 5 ids, which 4 ranks can't share: the last would have none"),
    ],
)  # fmt: skip
def test_what_ranks_do_not_divide_is_refused_by_name(change: dict[str, object], ranks: int, message: str) -> None:
    spec, _ = random_model(replace(_PLAIN, **change))  # type: ignore[arg-type]
    for rank in range(ranks):
        with pytest.raises(UnsupportedModelError) as error:
            shard(spec, rank, ranks)
        assert str(error.value) == f"random: {message}"


def test_quantised_columns_are_cut_at_borders_of_blocks_alone() -> None:
    recipe = replace(_PLAIN, head_size=32, num_heads=8, num_kv_heads=8, hidden_size=256, weights="Q8_0")
    spec, checkpoint = random_model(replace(recipe, feed_forward_size=32))
    check_tensors(shard(spec, 0, 1, checkpoint), checkpoint)
    with pytest.raises(
        UnsupportedModelError,
        match=r"^random.gguf: tensor 'layers.0.down.weight' can't be shared so by ranks: columns 16 to 32 are not at"
        r" borders of Q8_0 blocks, which hold 32 columns$",
    ):
        check_tensors(shard(spec, 1, 2, checkpoint), checkpoint)


@pytest.mark.parametrize(("size", "ranks", "widths"), [(128, 2, (64, 64)), (96, 2, (32, 64)), (160, 4, (32, 64))])
def test_parts_are_whole_blocks_and_not_always_of_one_size(size: int, ranks: int, widths: tuple[int, int]) -> None:
    """Of two layers the first rank has the fewest in the first one, and the most in the second."""
    recipe = replace(_PLAIN, head_size=32, num_heads=8, num_kv_heads=8, hidden_size=256, weights="Q8_0")
    spec, checkpoint = random_model(replace(recipe, feed_forward_size=size))
    part = shard(spec, 0, ranks, checkpoint)
    check_tensors(part, checkpoint)
    assert [layer.feed_forward.up.out_features for layer in part.layers][:2] == list(widths)  # type: ignore[union-attr]
    ids = random_tokens(recipe, 4)
    whole = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    found = sharded_logits(spec, checkpoint, ranks, ids, np.float64)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("ranks", [4, 8])
def test_ranks_beyond_the_blocks_of_experts_have_copies_that_weigh_nothing(ranks: int) -> None:
    """And nothing of what experts share. But where one rank alone adds biases, which then might be one of those."""
    recipe = replace(_PLAIN, head_size=32, num_heads=8, num_kv_heads=8, hidden_size=256, weights="Q8_0", experts=4)
    recipe = replace(recipe, feed_forward_size=96, windows=(None,), parts=("expert_scales", "shared", "shared_gate"))
    spec, checkpoint = random_model(recipe)
    parts = [shard(spec, rank, ranks, checkpoint).mixtures()[0][1] for rank in range(ranks)]
    assert [part.up.out_features for part in parts] == [32] * ranks
    shared = [part.shared for part in parts]
    assert [part and part.up.out_features for part in shared] == [32] * 3 + [None] * (ranks - 3)
    assert [part.scale for part in parts] == [spec.mixtures()[0][1].scale] * 3 + [0.0] * (ranks - 3)
    check_tensors(shard(spec, ranks - 1, ranks, checkpoint), checkpoint)
    ids = random_tokens(recipe, 4)
    whole = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    found = sharded_logits(spec, checkpoint, ranks, ids, np.float64)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-12 * np.abs(whole).max())
    biased, checkpoint = random_model(replace(recipe, parts=("expert_biases",)))
    with pytest.raises(UnsupportedModelError, match=r"layers\.\d\.\S+ can't be shared so by ranks: columns 0 to 24 "):
        check_tensors(shard(biased, 0, 4, checkpoint), checkpoint)


def test_no_rank_beyond_the_last_and_no_part_of_a_part() -> None:
    spec = hybrid_spec()
    assert shard(spec, 0, 1) is spec
    for rank, ranks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {ranks}"):
            shard(spec, rank, ranks)
    dense, _ = _model("dense")
    with pytest.raises(ValueError, match="of a model that 2 share"):
        shard(shard(dense, 0, 2), 0, 2)

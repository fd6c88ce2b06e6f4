"""OLMoE: experts in every layer, and norms over all heads of Q and K. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.experts import Mixture, read_expert_counts
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """The feed-forward length of its files is that of one expert."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes)
    # A GGUF file can't say that weights are divided by their sum: llama.cpp does not.
    normalized = hparams.boolean(None, "norm_topk_prob", default=False)
    mixture = Mixture(*read_expert_counts(hparams), sizes.feed_forward_size, normalized)
    biases = builder.attention_biases()
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=biases, qk_norm="token"),
        lambda index: mixture.build(builder, index),
    )
    return builder.spec(layers, tied_by_default=False)

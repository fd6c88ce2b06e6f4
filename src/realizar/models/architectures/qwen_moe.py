"""Qwen2, Qwen3 and the text model of Qwen3-VL with experts in place of most layers' feed-forward."""

from __future__ import annotations

from dataclasses import replace

from realizar.models.architectures.qwen import read_deepstack, read_vision_keys, with_axes
from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import APART, Joined, Mixture, read_expert_counts, read_expert_width
from realizar.models.hyper_parameters import REQUIRED, HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

SHARED_NAMES = {
    f"mlp.shared_experts.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}  # fmt: skip
"""Names of a shared expert in safetensors checkpoints, by their canonical ones."""


def build_qwen2(hparams: HyperParameters) -> ModelSpec:
    """Qwen2 with experts, biases on Q, K and V, and a shared expert behind a gate. Weights sum to less than one."""
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, names=SHARED_NAMES)
    shared = hparams.integer(
        "expert_shared_feed_forward_length",
        "shared_expert_intermediate_size",
        high=MAX_FEED_FORWARD,
        default=sizes.feed_forward_size if hparams.is_gguf else REQUIRED,  # as llama.cpp has it
    )
    normalized = hparams.boolean(None, "norm_topk_prob", default=False)
    qkv_bias = builder.bias("qkv_bias", "self_attn.q_proj", default=not hparams.is_gguf)
    return _build(builder, read_rope(hparams, sizes), normalized, (qkv_bias, False), shared_width=shared)


def build_qwen3(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes)
    hparams.only(None, "use_qk_norm", True)  # Qwen3-Coder names what every one of these models has
    # A GGUF file can't say that weights are not divided by their sum, nor that some layers are dense.
    normalized = hparams.boolean(None, "norm_topk_prob", default=hparams.is_gguf)
    return _build(builder, read_rope(hparams, sizes), normalized, builder.attention_biases())


def build_qwen3vl(hparams: HyperParameters) -> ModelSpec:
    """The text model of Qwen3-VL with experts, whose weights transformers divides by their sum whatever a key says.

    Published experts lie transposed; those that transformers saves do not.
    """
    read_vision_keys(hparams)
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes, is_part=True)
    hparams.only(None, "norm_topk_prob", True)
    rope = read_rope(hparams, sizes, default_base=10000.0 if hparams.is_gguf else 5e5, has_axes=True)
    rope = with_axes(hparams, rope)
    spec = _build(builder, rope, True, builder.attention_biases(), joined=Joined(transposed=None))
    return replace(spec, deepstack=read_deepstack(hparams))


def _build(
    builder: SpecBuilder,
    rope: Rope,
    normalized: bool,
    biases: tuple[bool, bool],
    *,
    joined: Joined = APART,
    shared_width: int = 0,
) -> ModelSpec:
    """Models with a shared expert, of `shared_width`, have no norms of Q and K."""
    hparams, sizes = builder.hparams, builder.sizes
    hparams.only(None, "use_sliding_window", False)
    count, per_token = read_expert_counts(hparams)
    stated = hparams.integer("expert_used_count", None, high=count, default=1)
    # As llama.cpp has it.
    width = read_expert_width(
        hparams, default=max(sizes.feed_forward_size // stated, 1) if hparams.is_gguf else REQUIRED
    )
    mixture = Mixture(
        count,
        per_token,
        width,
        normalized,
        shared_width=shared_width,
        has_shared_gate=shared_width > 0,
        joined=joined,
    )
    is_dense = read_dense_layers(hparams, sizes)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=biases, qk_norm=None if shared_width else "head"),
        lambda index: builder.feed_forward(index) if is_dense[index] else mixture.build(builder, index),
    )
    return builder.spec(layers, tied_by_default=False)


def read_dense_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    step = hparams.integer(None, "decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = hparams.raw(None, "mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(index, bool) or not isinstance(index, int) for index in dense):
        raise hparams.malformed(None, "mlp_only_layers", "expected a list of layers")
    return [index in dense or (index + 1) % step != 0 for index in range(sizes.num_layers)]

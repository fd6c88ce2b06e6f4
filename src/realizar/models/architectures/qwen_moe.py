"""Qwen3 with experts in place of most layers' feed-forward. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import build_experts, read_expert_count
from realizar.models.hyper_parameters import REQUIRED, HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build_qwen3(hparams: HyperParameters) -> ModelSpec:
    """Qwen3 with experts."""
    sizes = read_dimensions(hparams)
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes)
    if hparams.boolean(None, "use_sliding_window", default=False):
        raise hparams.unsupported(None, "use_sliding_window", True)
    if not hparams.boolean(None, "use_qk_norm", default=True):  # Qwen3-Coder names what every one of these models has
        raise hparams.unsupported(None, "use_qk_norm", False)
    count = read_expert_count(hparams)
    per_token = hparams.integer("expert_used_count", "num_experts_per_tok", high=count)
    width = hparams.integer(
        "expert_feed_forward_length",
        "moe_intermediate_size",
        high=MAX_FEED_FORWARD,
        # As llama.cpp has it.
        default=max(sizes.feed_forward_size // per_token, 1) if hparams.is_gguf else REQUIRED,
    )
    # A GGUF file can't say that weights are not divided by their sum, nor that some layers are dense.
    normalized = hparams.boolean(None, "norm_topk_prob", default=hparams.is_gguf)
    is_dense = _read_dense_layers(hparams, sizes)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm="head"),
            feed_forward=builder.feed_forward(index, activation)
            if is_dense[index]
            else build_experts(
                builder, index, activation, count=count, per_token=per_token, width=width, normalized=normalized
            ),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)


def _read_dense_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`th."""
    step = hparams.integer(None, "decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = hparams.raw(None, "mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(index, bool) or not isinstance(index, int) for index in dense):
        raise hparams.malformed(None, "mlp_only_layers", "expected a list of layers")
    return [index in dense or (index + 1) % step != 0 for index in range(sizes.num_layers)]

"""Llama and the models of its kind (SmolLM2, TinyLlama), Mistral, and Mixtral. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.experts import MAX_EXPERTS, build_experts, read_expert_count, read_experts_per_token
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder

MIXTRAL_NAMES = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.0.gate_proj": "block_sparse_moe.experts.0.w1",
    "mlp.experts.0.up_proj": "block_sparse_moe.experts.0.w3",
    "mlp.experts.0.down_proj": "block_sparse_moe.experts.0.w2",
}
"""Names of the experts in safetensors files, which those of MiniMax have too."""


def build(hparams: HyperParameters) -> ModelSpec:
    """A GGUF file with a sliding window is a Mistral, windowed in all layers; one with experts is a Mixtral."""
    sizes, is_mixtral = read_dimensions(hparams), hparams.architecture == "mixtral"
    builder = SpecBuilder(hparams, sizes, names=MIXTRAL_NAMES if is_mixtral else None)
    # Converters to GGUF reorder the rows of Q and K so that rotated pairs are neighbours.
    rope = read_rope(hparams, sizes, pairing="interleaved", default_base=1e6 if is_mixtral else 10000.0)
    if hparams.is_gguf and rope.size != sizes.head_size:
        raise hparams.unsupported("rope.dimension_count", None, rope.size)
    windows: list[int | None] = [None] * sizes.num_layers
    if hparams.architecture in ("mistral", "mixtral") or hparams.is_gguf:
        windows = builder.windows(lambda _: True, default=4096 if hparams.architecture == "mistral" else None)
    scale = hparams.optional_number("attention.scale", None)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("mlp_bias", "mlp.down_proj")
    experts = _read_experts(hparams) if is_mixtral or hparams.is_gguf else None
    layers = [
        Layer(
            mixer=builder.attention(
                index, rope=rope, scale=scale, window=windows[index], qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=builder.feed_forward(index, activation, bias=mlp_bias)
            if experts is None
            else build_experts(
                builder, index, activation, count=experts[0], per_token=experts[1], width=sizes.feed_forward_size,
                normalized=True,
            ),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]  # fmt: skip
    return builder.spec(layers, tied_by_default=False)


def _read_experts(hparams: HyperParameters) -> tuple[int, int] | None:
    if hparams.is_gguf and not hparams.integer("expert_count", None, low=0, high=MAX_EXPERTS, default=0):
        return None
    count = read_expert_count(hparams)
    return count, read_experts_per_token(hparams, count)

"""Qwen2 (biases on Q, K and V) and Qwen3 (norms over each head of Q and K). Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import MAX_LAYERS, read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build_qwen2(hparams: HyperParameters) -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return _build(hparams, qk_norm=False)


def build_qwen3(hparams: HyperParameters) -> ModelSpec:
    """Qwen3, dense."""
    return _build(hparams, qk_norm=True)


def _build(hparams: HyperParameters, *, qk_norm: bool) -> ModelSpec:
    sizes = read_dimensions(hparams, defaults={"head_dim": 128} if qk_norm else None)
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes)
    windows = _read_windows(hparams, builder)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias" if qk_norm else None, "self_attn.q_proj", default=not qk_norm)
    output_bias = builder.bias("attention_bias" if qk_norm else None, "self_attn.o_proj")
    layers = [
        Layer(
            mixer=builder.attention(
                index,
                rope=rope,
                window=windows[index],
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm="head" if qk_norm else None,
            ),
            feed_forward=builder.feed_forward(index, activation),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)


def _read_windows(hparams: HyperParameters, builder: SpecBuilder) -> list[int | None]:
    """Off unless `use_sliding_window`, then from layer `max_window_layers` on; in GGUF files only with a pattern."""
    count = builder.sizes.num_layers
    if hparams.is_gguf:
        if not hparams.is_present("attention.sliding_window_pattern", None):
            return [None] * count
        return builder.windows(lambda _: False)
    if not hparams.boolean(None, "use_sliding_window", default=False):
        return [None] * count
    first = hparams.integer(None, "max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return builder.windows(lambda index: index >= first, default=4096)

"""Qwen2 (biases on Q, K and V) and Qwen3 (norms over each head of Q and K). Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import MAX_LAYERS, read_dimensions
from realizar.models.hyper_parameters import Settings
from realizar.models.rope_settings import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import Decoder


def build_qwen2(settings: Settings) -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return _build(settings, is_third=False)


def build_qwen3(settings: Settings) -> ModelSpec:
    """Qwen3, dense."""
    return _build(settings, is_third=True)


def _build(settings: Settings, *, is_third: bool) -> ModelSpec:
    sizes = read_dimensions(settings, defaults={"head_dim": 128} if is_third else None)
    decoder = Decoder(settings, sizes)
    rope = read_rope(settings, sizes)
    windows = _read_windows(settings, decoder)
    activation = decoder.activation()
    qkv_bias = decoder.bias("attention_bias" if is_third else None, "self_attn.q_proj", default=not is_third)
    output_bias = decoder.bias("attention_bias" if is_third else None, "self_attn.o_proj")
    layers = [
        Layer(
            attention=decoder.attention(
                index,
                rope=rope,
                window=windows[index],
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                qk_norm="head" if is_third else None,
            ),
            feed_forward=decoder.feed_forward(index, activation),
            input_norm=decoder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=decoder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return decoder.spec(layers, tied_by_default=False)


def _read_windows(settings: Settings, decoder: Decoder) -> list[int | None]:
    """Off unless `use_sliding_window`, then from layer `max_window_layers` on; in GGUF files only with a pattern."""
    count = decoder.sizes.num_layers
    if settings.is_gguf:
        if not settings.is_present("attention.sliding_window_pattern", None):
            return [None] * count
        return decoder.windows(lambda _: False)
    if not settings.boolean(None, "use_sliding_window", default=False):
        return [None] * count
    first = settings.integer(None, "max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return decoder.windows(lambda index: index >= first, default=4096)

"""Llama and the models of its kind (SmolLM2, TinyLlama, SmolVLM's text), Mistral, Mixtral. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.experts import MAX_EXPERTS, Mixture, read_expert_counts
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

MIXTRAL_NAMES = {
    "mlp.gate": "block_sparse_moe.gate",
    "mlp.experts.0.gate_proj": "block_sparse_moe.experts.0.w1",
    "mlp.experts.0.up_proj": "block_sparse_moe.experts.0.w3",
    "mlp.experts.0.down_proj": "block_sparse_moe.experts.0.w2",
}
"""Names of the experts in safetensors files, which those of MiniMax have too."""


def build(hparams: HyperParameters, *, is_part: bool = False) -> ModelSpec:
    """A GGUF file with a sliding window is a Mistral, windowed in all layers; one with experts is a Mixtral.

    With `is_part` it is the text model of a vision model.
    """
    if is_part:
        _read_resampler_keys(hparams)
    sizes, is_mixtral = read_dimensions(hparams), hparams.architecture == "mixtral"
    builder = SpecBuilder(hparams, sizes, names=MIXTRAL_NAMES if is_mixtral else None, is_part=is_part)
    default_base = 1e6 if is_mixtral else 10000.0
    rope = read_rope(hparams, sizes, pairing="interleaved", default_base=default_base)
    windows: list[int | None] = [None] * sizes.num_layers
    if hparams.architecture in ("mistral", "mixtral") or hparams.is_gguf:
        windows = builder.windows(lambda _: True, default=4096 if hparams.architecture == "mistral" else None)
    scale = hparams.optional_number("attention.scale", None)
    biases, mlp_bias = builder.attention_biases(), builder.bias("mlp_bias", "mlp.down_proj")
    has_experts = hparams.integer("expert_count", None, low=0, high=MAX_EXPERTS, default=int(is_mixtral)) > 0
    mixture = Mixture(*read_expert_counts(hparams), sizes.feed_forward_size) if has_experts else None
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, scale=scale, window=windows[index], biases=biases),
        lambda index: builder.feed_forward(index, bias=mlp_bias) if mixture is None else mixture.build(builder, index),
    )
    return builder.spec(layers, tied_by_default=False)


def _read_resampler_keys(hparams: HyperParameters) -> None:
    """Keys of Idefics' text models that say how an encoder of images is reduced, which these models do otherwise."""
    hparams.only(None, "use_resampler", False)
    hparams.only(None, "qk_layer_norms", False)
    hparams.only(None, "rope_interleaved", False)
    for key in ("perceiver_config", "pixel_shuffle_factor", "neftune_noise_alpha"):
        hparams.raw(None, key)

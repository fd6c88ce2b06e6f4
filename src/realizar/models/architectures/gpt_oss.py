"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a window on every second layer."""

from __future__ import annotations

from dataclasses import replace

from realizar.models.dimensions import read_dimensions
from realizar.models.experts import Joined, Mixture, read_expert_counts, read_expert_width
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Rope
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Attention, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

_WINDOW = 128
_JOINED = Joined(transposed=True, alternating=True, bias="_bias")


def build(hparams: HyperParameters) -> ModelSpec:
    """Its frequencies come from YaRN without rounding, as in OpenAI's code and by `truncate` of its configuration.

    A GGUF file can't say so, and llama.cpp rounds: the model was trained without.
    """
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5, "head_dim": 64})
    builder = SpecBuilder(hparams, sizes, names={"mlp.gate": "mlp.router"}, gguf_names=GGUF_POST_ATTENTION)
    rope = read_rope(hparams, sizes, default_base=150000.0, yarn_truncate=False)
    windows = builder.windows(lambda index: index % 2 == 0, default=None if hparams.is_gguf else _WINDOW)
    counts, stated = read_expert_counts(hparams), hparams.raw(None, "num_experts_per_tok")
    if hparams.raw(None, "experts_per_token") not in (None, stated):  # published configurations have both
        raise hparams.malformed(None, "experts_per_token", f"num_experts_per_tok says {stated}")
    width = read_expert_width(hparams, "intermediate_size")
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if hparams.number(None, key, default=value) != value:
            raise hparams.unsupported(None, key, hparams.raw(None, key))
    bias = hparams.boolean(None, "attention_bias", default=True)
    mixture = Mixture(*counts, width, router_bias=True, clamped=True, joined=_JOINED)
    layers = builder.layers(
        lambda index: _attention(builder, index, rope, windows[index], bias=bias),
        lambda index: mixture.build(builder, index),
    )
    return builder.spec(layers, tied_by_default=False)


def _attention(builder: SpecBuilder, index: int, rope: Rope, window: int | None, *, bias: bool) -> Attention:
    attention = builder.attention(index, rope=rope, window=window, biases=(bias, bias))
    sinks = builder.vector(index, "self_attn.sinks", attention.num_heads, gguf="attn_sinks.weight")
    return replace(attention, sinks=sinks)

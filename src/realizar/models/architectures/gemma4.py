"""The text model of Gemma 4: heads of two sizes, values with norms, an input of its own for each layer, experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realizar.errors import UnsupportedModelError
from realizar.models.architectures.gemma4_experts import GemmaMixture, read_mixture
from realizar.models.dimensions import (
    MAX_FEED_FORWARD,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    read_dimensions,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.layer_inputs import InputGate, LayerInputs
from realizar.models.mixers import SharedAttention
from realizar.models.parts import Rope
from realizar.models.rope import proportional_frequencies
from realizar.models.rope_parameters import make_rope, plain_rope, read_local_rope, read_rope
from realizar.models.spec import Attention, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION
from realizar.models.tensor_source import TensorName, TensorSource

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
"""Configurations inside others name only what differs from these."""
_PERIOD = 6  # the last layer of each six is full


@dataclass(frozen=True, slots=True)
class _Shape:
    """Parameters that differ between layers: `source` is the layer whose keys and values it takes, or None."""

    is_local: bool
    window: int | None
    head_size: int
    num_kv_heads: int
    feed_forward_size: int
    source: int | None
    k_is_v: bool


def build(hparams: HyperParameters) -> ModelSpec:
    hparams.only(None, "use_bidirectional_attention", "vision")  # of images alone
    sizes = read_dimensions(hparams, defaults=DEFAULTS, varies=True)
    builder = SpecBuilder(
        hparams,
        sizes,
        activation_key="hidden_activation",
        default_activation="gelu_tanh",
        is_part=True,
        names={"mlp.gate": "router.proj"},
        gguf_names=GGUF_POST_ATTENTION,
    )
    mixture = read_mixture(hparams)
    shapes = _read_shapes(hparams, builder)
    inputs = _read_layer_inputs(hparams, builder)
    layers = [_layer(builder, index, shape, inputs, mixture) for index, shape in enumerate(shapes)]
    unused = {
        builder.stored_name(f"model.layers.{index}.self_attn.{name}.weight")
        for index, shape in enumerate(shapes)
        if shape.source is not None
        for name in ("k_proj", "v_proj", "k_norm")
    }
    return builder.spec(
        layers,
        tied_by_default=True,
        embedding_scale=math.sqrt(sizes.hidden_size),
        logit_soft_cap=hparams.optional_number("final_logit_softcapping", "final_logit_softcapping"),
        is_ignored=unused.__contains__,
        layer_inputs=inputs,
    )


def assistant_layers(builder: SpecBuilder, model: ModelSpec) -> list[Layer]:
    """The layers of an assistant of a model: each reads the last layer of its kind that has keys and values.

    Raises UnsupportedModelError for keys that an assistant has not, or a model without such a layer.
    """
    hparams = builder.hparams
    for gguf, hf, known in (
        ("expert_count", "enable_moe_block", 0 if hparams.is_gguf else False),
        ("embedding_length_per_layer_input", "hidden_size_per_layer_input", 0),
        (None, "vocab_size_per_layer_input", 0),
        (None, "use_double_wide_mlp", False),
    ):
        hparams.only(gguf, hf, known)
    read_mixture(hparams)  # the keys of experts, which are without effect
    lent = {mixer.sees_images_whole: index for index, mixer in model.attentions()}
    return [_layer(builder, index, shape) for index, shape in enumerate(_read_shapes(hparams, builder, lent))]


def _layer(
    builder: SpecBuilder,
    index: int,
    shape: _Shape,
    inputs: LayerInputs | None = None,
    mixture: GemmaMixture | None = None,
) -> Layer:
    base, hidden = f"model.layers.{index}", builder.sizes.hidden_size
    dense, gate = builder.feed_forward(index, width=shape.feed_forward_size), None
    if inputs is not None:
        gate = InputGate(
            activation=builder.activation,
            gate=builder.linear(f"{base}.per_layer_input_gate", inputs.size, hidden, bias=False),
            projection=builder.linear(f"{base}.per_layer_projection", hidden, inputs.size, bias=False),
            norm=builder.norm(f"{base}.post_per_layer_input_norm"),
        )
    return Layer(
        mixer=_mixer(builder, index, shape),
        feed_forward=dense if mixture is None else mixture.build(builder, index, dense),
        input_norm=builder.norm(f"{base}.input_layernorm"),
        post_mixer_norm=builder.norm(f"{base}.post_attention_layernorm"),
        pre_feedforward_norm=builder.norm(f"{base}.pre_feedforward_layernorm") if mixture is None else None,
        post_feedforward_norm=builder.norm(f"{base}.post_feedforward_layernorm"),
        input_gate=gate,
        output_scale=_output_scale(builder, index),
    )


def _mixer(builder: SpecBuilder, index: int, shape: _Shape) -> Attention | SharedAttention:
    """Attention whose scale is one: norms of Q and K stand for it."""
    base, sizes = f"model.layers.{index}.self_attn", builder.sizes
    queries, keys = sizes.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    bias, output_bias = builder.attention_biases()
    q = builder.linear(f"{base}.q_proj", queries, sizes.hidden_size, bias=bias)
    o = builder.linear(f"{base}.o_proj", sizes.hidden_size, queries, bias=output_bias)
    q_norm = builder.norm(f"{base}.q_norm", shape.head_size)
    rope = _rope(builder, shape)
    if shape.source is not None:
        heads = sizes.num_heads, shape.num_kv_heads, shape.head_size
        return SharedAttention(shape.source, *heads, 1.0, q, o, rope, shape.window, q_norm=q_norm)
    k = builder.linear(f"{base}.k_proj", keys, sizes.hidden_size, bias=bias)
    return Attention(
        num_heads=sizes.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        scale=1.0,
        q=q,
        k=k,
        v=k if shape.k_is_v else builder.linear(f"{base}.v_proj", keys, sizes.hidden_size, bias=bias),
        o=o,
        rope=rope,
        window=shape.window,
        q_norm=q_norm,
        k_norm=builder.norm(f"{base}.k_norm", shape.head_size),
        v_norm_eps=sizes.norm_eps,
        sees_images_whole=shape.is_local,
    )


def _output_scale(builder: SpecBuilder, index: int) -> TensorName | None:
    """The factor of a layer's output, which a GGUF file may leave out."""
    name = "layer_scalar.weight"
    if builder.hparams.is_gguf and not builder.has(f"model.layers.{index}.{name}"):
        return None
    return builder.vector(index, name, 1, gguf="layer_output_scale.weight", hf="layer_scalar")


def _rope(builder: SpecBuilder, shape: _Shape) -> Rope:
    hparams, sizes = builder.hparams, replace(builder.sizes, head_size=shape.head_size)
    if not shape.is_local:
        if not hparams.is_gguf and hparams.raw(None, "rope_parameters") is None:
            return make_rope(proportional_frequencies(1e6, shape.head_size, 0.25, 1.0))  # as transformers has it
        return read_rope(hparams, sizes, default_base=10000.0 if hparams.is_gguf else 1e6)
    if not hparams.is_gguf:
        return read_local_rope(hparams, sizes, base_key="rope_local_base_freq", default_base=10000.0)
    size = hparams.integer("rope.dimension_count_swa", None, low=2, high=shape.head_size, default=shape.head_size)
    if size % 2:
        raise hparams.malformed("rope.dimension_count_swa", None, f"{size} is odd")
    return plain_rope(hparams.number("rope.freq_base_swa", None, default=10000.0, above=1.0), size)


def _read_layer_inputs(hparams: HyperParameters, builder: SpecBuilder) -> LayerInputs | None:
    sizes = builder.sizes
    key = "hidden_size_per_layer_input"
    absent = 256 if not hparams.is_gguf and not hparams.is_present(None, key) else 0
    size = hparams.integer("embedding_length_per_layer_input", key, low=0, high=MAX_WIDTH, default=absent)
    rows = hparams.integer(None, "vocab_size_per_layer_input", high=1 << 25, default=sizes.vocab_size)
    if size == 0:
        return None
    if rows != sizes.vocab_size:
        raise hparams.unsupported(None, "vocab_size_per_layer_input", rows)
    width = sizes.num_layers * size
    table = "model.embed_tokens_per_layer.weight"
    builder.note(table, TensorSource(builder.stored_name(table), (rows, width)))
    norm = builder.norm("model.per_layer_projection_norm", size)
    # The projection is scaled by the inverse root of its in_features, which a norm takes back but for its epsilon.
    norm = replace(norm, eps=sizes.norm_eps * sizes.hidden_size)
    projection = builder.linear("model.per_layer_model_projection", width, sizes.hidden_size, bias=False)
    return LayerInputs(size, table, math.sqrt(size), projection, norm, math.sqrt(0.5))


def _read_shapes(
    hparams: HyperParameters, builder: SpecBuilder, lent: Mapping[bool, int] | None = None
) -> list[_Shape]:
    """`lent` are layers of a model, with a window or without, where all layers take its keys and values."""
    count = builder.sizes.num_layers
    is_local = builder.windowed_layers(lambda index: (index + 1) % _PERIOD != 0)
    if not hparams.is_present("attention.sliding_window_pattern", None):
        is_local[-1] = False  # as transformers has it, whatever a configuration lists
    windows = builder.windows(lambda index: is_local[index], default=None if hparams.is_gguf else 512)
    shared = hparams.integer("attention.shared_kv_layers", "num_kv_shared_layers", low=0, high=MAX_LAYERS, default=0)
    owners = count - shared if lent is None else 0
    key = ("attention.shared_kv_layers", "num_kv_shared_layers")
    if lent is not None:
        if shared not in (0, count):  # 0 is all too, as transformers has it
            raise hparams.unsupported(*key, shared)
        if not set(is_local) <= lent.keys():
            raise UnsupportedModelError(f"{hparams.path}: its model has no layers of the kinds whose keys it reads")
        last = lent
    elif owners < 1 or set(is_local[:owners]) != set(is_local):
        raise hparams.malformed(*key, f"{shared} of {count} layers leave no layer whose keys the others could take")
    else:
        last = {kind: max(index for index in range(owners) if is_local[index] == kind) for kind in set(is_local)}
    heads = _read_gguf_heads(hparams, builder, is_local) if hparams.is_gguf else _read_heads(hparams, builder, is_local)
    widths = _read_widths(hparams, builder, owners)
    k_is_v = _read_k_is_v(hparams, builder, is_local)
    for size, kv_heads in heads:
        if builder.sizes.num_heads % kv_heads or size % 2:
            key = ("attention.head_count_kv", "num_key_value_heads")
            raise hparams.malformed(*key, f"{kv_heads} KV heads of size {size} for {builder.sizes.num_heads} heads")
    sources = [None if index < owners else last[flag] for index, flag in enumerate(is_local)]
    if lent is None:
        heads = [heads[index if source is None else source] for index, source in enumerate(sources)]
    return [
        _Shape(
            is_local=is_local[index],
            window=windows[index] if is_local[index] else None,
            head_size=heads[index][0],
            num_kv_heads=heads[index][1],
            feed_forward_size=widths[index],
            source=sources[index],
            k_is_v=k_is_v[index],
        )
        for index in range(count)
    ]


def _read_gguf_heads(hparams: HyperParameters, builder: SpecBuilder, is_local: list[bool]) -> list[tuple[int, int]]:
    full = builder.sizes.head_size
    local = hparams.integer("attention.key_length_swa", None, high=MAX_HEAD_SIZE, default=full)
    if hparams.integer("attention.value_length_swa", None, high=MAX_HEAD_SIZE, default=local) != local:
        raise hparams.unsupported("attention.value_length_swa", None, hparams.raw("attention.value_length_swa", None))
    kv_heads = hparams.integers("attention.head_count_kv", len(is_local), high=MAX_HEADS)
    return [(local if flag else full, count) for flag, count in zip(is_local, kv_heads, strict=True)]


def _read_heads(hparams: HyperParameters, builder: SpecBuilder, is_local: list[bool]) -> list[tuple[int, int]]:
    """Head size and KV heads of each layer; transformers 5 writes them by layer, published files for full layers."""
    sizes = builder.sizes
    by_layer: Any = hparams.raw(None, "per_layer_config")
    full_size = hparams.integer(None, "global_head_dim", high=MAX_HEAD_SIZE, default=512)
    full_heads = hparams.integer(None, "num_global_key_value_heads", high=MAX_HEADS, default=sizes.num_kv_heads)
    if not hparams.boolean(None, "attention_k_eq_v", default=False):
        full_heads = sizes.num_kv_heads
    own = sizes.head_size, sizes.num_kv_heads
    if by_layer is None:
        return [own if flag else (full_size, full_heads) for flag in is_local]
    if not isinstance(by_layer, Mapping):
        raise hparams.malformed(None, "per_layer_config", "expected an object")
    heads = []
    for index in range(len(is_local)):
        values = by_layer.get(str(index), {})
        if not isinstance(values, Mapping):
            raise hparams.malformed(None, "per_layer_config", f"expected an object for layer {index}")
        one = hparams.nested(f"per_layer_config.{index}", values)
        size = one.integer(None, "head_dim", high=MAX_HEAD_SIZE, default=own[0])
        heads.append((size, one.integer(None, "num_key_value_heads", high=MAX_HEADS, default=own[1])))
    return heads


def _read_widths(hparams: HyperParameters, builder: SpecBuilder, owners: int) -> list[int]:
    """Feed-forward sizes; `use_double_wide_mlp` doubles those of layers with another's keys."""
    count, width = builder.sizes.num_layers, builder.sizes.feed_forward_size
    if hparams.is_gguf:
        return hparams.integers("feed_forward_length", count, high=MAX_FEED_FORWARD)
    doubles = hparams.boolean(None, "use_double_wide_mlp", default=False)
    return [2 * width if doubles and index >= owners else width for index in range(count)]


def _read_k_is_v(hparams: HyperParameters, builder: SpecBuilder, is_local: list[bool]) -> list[bool]:
    """`attention_k_eq_v` is of all full layers; a GGUF file has no V in any of them."""
    if hparams.is_gguf:
        full = [index for index, flag in enumerate(is_local) if not flag]
        both = not any(builder.has(f"model.layers.{index}.self_attn.v_proj.weight") for index in full)
    else:
        both = hparams.boolean(None, "attention_k_eq_v", default=False)
    return [both and not flag for flag in is_local]

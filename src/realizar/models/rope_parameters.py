"""`read_rope` reads a checkpoint's rope parameters and scaling into a `Rope`. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.dimensions import MAX_CONTEXT, Dimensions
from realizar.models.hyper_parameters import MIN_NUMBER, HyperParameters
from realizar.models.parts import QueryGrowth, Rope
from realizar.models.rope import (
    Frequencies,
    divided_frequencies,
    linear_frequencies,
    llama3_frequencies,
    longrope_magnitude,
    plain_frequencies,
    proportional_frequencies,
    yarn_frequencies,
    yarn_magnitude,
)

Pairing = Literal["neox", "interleaved"]
MAX_FACTOR = 1e6
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def read_rope(
    hparams: HyperParameters,
    sizes: Dimensions,
    *,
    pairing: Pairing = "neox",
    config_pairing: Pairing = "neox",
    layer_type: str = "full_attention",
    default_base: float = 10000.0,
    has_axes: bool = False,
    default_partial: float = 1.0,
    yarn_truncate: bool = True,
) -> Rope:
    """The rotary embedding that a checkpoint describes.

    Args:
        pairing, config_pairing: in GGUF and in Hugging Face's format, where nearly all architectures have `neox`.
            Converters to GGUF reorder whole heads of Q and K so that rotated pairs are neighbours (`interleaved`).
        layer_type: the entry of `rope_parameters`, if these differ between kinds of layers.
        has_axes: the configuration may name the rope of three axes, which for text is plain.
        default_partial: the part of a head that is rotated where a configuration does not say.
        yarn_truncate: `truncate` of `yarn_frequencies` in the GGUF format, which has no key for it.

    Raises:
        CheckpointError: a parameter is missing or out of range.
        UnsupportedModelError: an unknown kind of scaling, or a part of a reordered head that is rotated.
    """
    if hparams.is_gguf:
        rope = _read_gguf(hparams, sizes, pairing, default_base, yarn_truncate)
        if pairing == "interleaved" != config_pairing and rope.size != sizes.head_size:
            raise hparams.unsupported("rope.dimension_count", None, rope.size)
        return rope
    rope = _read_config(hparams, sizes, layer_type, (default_base, default_partial), has_axes)
    return replace(rope, pairing=config_pairing)


def read_local_rope(hparams: HyperParameters, sizes: Dimensions, *, base_key: str, default_base: float) -> Rope:
    """The rope of windowed layers, which the scaling of full ones does not touch.

    `base_key` is of its base in configurations that have no `rope_parameters`.
    """
    if hparams.is_gguf:
        size = hparams.integer("rope.dimension_count", None, low=2, high=sizes.head_size, default=sizes.head_size)
        return plain_rope(hparams.number("rope.freq_base_swa", None, default=default_base, above=1.0), size)
    if hparams.is_present(None, "rope_parameters"):
        return read_rope(hparams, sizes, layer_type="sliding_attention", default_base=default_base)
    return plain_rope(hparams.number(None, base_key, default=default_base, above=1.0), sizes.head_size)


def read_query_growth(hparams: HyperParameters, sizes: Dimensions) -> QueryGrowth | None:
    """The growth of queries with the position (llama 4, Ministral 3), in steps of the rope's original context.

    None where the checkpoint has none, or where no position of the context is past the first step.
    """
    if hparams.is_gguf:
        factor = hparams.optional_number("attention.temperature_scale", None)
        key = "rope.scaling.original_context_length"
        period = hparams.integer(key, None, high=MAX_CONTEXT, default=sizes.trained_context_length)
    else:
        rope = config_parameters(hparams)
        factor = rope.optional_number(None, "llama_4_scaling_beta")
        period = _config_original_context(hparams, rope, sizes)
    return None if factor is None or sizes.context_length <= period else QueryGrowth(factor, period)


def plain_rope(base: float, size: int, pairing: Pairing = "neox") -> Rope:
    return make_rope(plain_frequencies(base, size), pairing)


def make_rope(frequencies: Frequencies, pairing: Pairing = "neox", magnitude: float = 1.0) -> Rope:
    """Of inverse frequencies in radians per position, float32 [size / 2]."""
    return Rope(pairing, tuple(frequencies.tolist()), magnitude)


def _read_gguf(
    hparams: HyperParameters, sizes: Dimensions, pairing: Pairing, default_base: float, yarn_truncate: bool
) -> Rope:
    size = hparams.integer("rope.dimension_count", None, low=2, high=sizes.head_size, default=sizes.head_size)
    if size % 2:
        raise hparams.malformed("rope.dimension_count", None, f"{size} is odd")
    base = hparams.number("rope.freq_base", None, default=default_base, above=1.0)
    kind = hparams.text("rope.scaling.type", None, default="")
    factor_key = "rope.scaling.factor"
    factor = hparams.optional_number(factor_key, None)
    if factor is None:
        factor_key = "rope.scale_linear"
        factor = hparams.optional_number(factor_key, None)
    original = hparams.integer(
        "rope.scaling.original_context_length", None, high=MAX_CONTEXT, default=sizes.trained_context_length
    )
    attention_factor = hparams.optional_number("rope.scaling.attn_factor", None)
    magnitude = attention_factor or 1.0
    if kind == "longrope" or (kind == "" and _LONG_FACTORS in hparams.checkpoint.tensors):
        if factor not in (None, 1.0):
            raise hparams.unsupported(factor_key, None, factor)
        chosen = _LONG_FACTORS if sizes.context_length > original else _SHORT_FACTORS
        chosen_divisors = _factor_tensor(hparams, chosen, size // 2)
        if chosen_divisors is None:
            raise CheckpointError(hparams.path, f"tensor '{chosen}'", "missing")
        if attention_factor is None:
            magnitude = longrope_magnitude(sizes.trained_context_length / original, max(original, 2))
        return make_rope(divided_frequencies(base, size, chosen_divisors), pairing, magnitude)
    divisors = _factor_tensor(hparams, "rope_freqs.weight", size // 2)
    if kind == "yarn":
        if divisors is not None:
            raise UnsupportedModelError(f"{hparams.path}: tensor 'rope_freqs.weight': unsupported together with YaRN")
        yarn_factor = hparams.number("rope.scaling.factor", None, high=MAX_FACTOR)
        frequencies = yarn_frequencies(base, size, yarn_factor, original, *_gguf_betas(hparams), yarn_truncate)
        total = hparams.optional_number("rope.scaling.yarn_attn_factor", None)
        return make_rope(frequencies, pairing, magnitude * (total or _gguf_yarn_magnitude(hparams, yarn_factor)))
    if kind not in ("", "none", "linear"):
        raise hparams.unsupported("rope.scaling.type", None, kind)
    linear = factor if factor is not None and kind != "none" else 1.0
    if divisors is not None:
        return make_rope(divided_frequencies(base, size, divisors, linear), pairing, magnitude)
    return make_rope(linear_frequencies(base, size, linear), pairing, magnitude)


def _gguf_betas(hparams: HyperParameters) -> tuple[float, float]:
    if hparams.number("rope.scaling.yarn_ext_factor", None, default=1.0) != 1.0:
        raise hparams.unsupported(
            "rope.scaling.yarn_ext_factor", None, hparams.raw("rope.scaling.yarn_ext_factor", None)
        )
    fast = hparams.number("rope.scaling.yarn_beta_fast", None, default=32.0)
    slow = hparams.number("rope.scaling.yarn_beta_slow", None, default=1.0)
    return fast, slow


def _gguf_yarn_magnitude(hparams: HyperParameters, factor: float) -> float:
    """As of `config.json` with `mscale` of 1 and `mscale_all_dim` of the key, which few files have."""
    scale_all = hparams.optional_number("rope.scaling.yarn_log_multiplier", None)
    return yarn_magnitude(factor) / (yarn_magnitude(factor, scale_all) if scale_all else 1.0)


def _factor_tensor(hparams: HyperParameters, name: str, count: int) -> NDArray[np.float32] | None:
    tensor = hparams.checkpoint.tensors.get(name)
    if tensor is None:
        return None
    if tensor.ggml_type != GGMLType.F32 or tensor.shape != (count,):
        found = f"{tensor.type_name} {tensor.shape}"
        raise CheckpointError(tensor.path, f"tensor '{name}'", f"expected {count} F32 values, found {found}")
    values = np.frombuffer(tensor.data.tobytes(), dtype="<f4")
    if not (np.isfinite(values).all() and (values >= MIN_NUMBER).all()):
        reason = f"a divisor is not a number of at least {MIN_NUMBER:g}"
        raise CheckpointError(tensor.path, f"tensor '{name}'", reason)
    return values


def _read_config(
    hparams: HyperParameters, sizes: Dimensions, layer_type: str, defaults: tuple[float, float], has_axes: bool
) -> Rope:
    """`defaults`: base, and the part of a head that is rotated."""
    rope, (default_base, default_partial) = config_parameters(hparams, layer_type), defaults
    top_level_base = hparams.number(None, "rope_theta", default=default_base, above=1.0)
    base = rope.number(None, "rope_theta", default=top_level_base, above=1.0)
    partial = hparams.number(None, "partial_rotary_factor", default=default_partial, high=1.0)
    share = rope.number(None, "partial_rotary_factor", default=partial, high=1.0)
    kind = rope.text(None, "rope_type", default=rope.text(None, "type", default="default"))
    if kind == "proportional":
        factor = rope.number(None, "factor", default=1.0, high=MAX_FACTOR)
        return make_rope(proportional_frequencies(base, sizes.head_size, share, factor))
    size = int(sizes.head_size * share)
    if size < 2 or size % 2:
        raise rope.malformed(None, "partial_rotary_factor", f"{size} rotated dimensions")
    if kind == "su" or (kind == "yarn" and hparams.architecture == "phi3"):
        kind = "longrope"  # the names that the first phi3 checkpoints used
    # "dynamic" changes frequencies only past max_position_embeddings, and no context here is longer.
    if kind in ("default", "dynamic") or (kind == "mrope" and has_axes):
        return plain_rope(base, size)
    if kind == "linear":
        return make_rope(linear_frequencies(base, size, rope.number(None, "factor", high=MAX_FACTOR)))
    if kind == "llama3":
        return _config_llama3(rope, base, size, _config_original_context(hparams, rope, sizes))
    if kind == "yarn":
        return _config_yarn(rope, base, size, _config_original_context(hparams, rope, sizes), sizes)
    if kind == "longrope":
        return _config_longrope(rope, base, size, _config_original_context(hparams, rope, sizes), sizes)
    raise rope.unsupported(None, "rope_type", kind)


def _config_llama3(rope: HyperParameters, base: float, size: int, original: int) -> Rope:
    factor = rope.number(None, "factor", high=MAX_FACTOR)
    low = rope.number(None, "low_freq_factor", high=MAX_FACTOR)
    high = rope.number(None, "high_freq_factor", above=low, high=MAX_FACTOR)
    return make_rope(llama3_frequencies(base, size, factor, low, high, original))


def _config_yarn(rope: HyperParameters, base: float, size: int, original: int, sizes: Dimensions) -> Rope:
    factor = rope.number(None, "factor", default=sizes.trained_context_length / original, high=MAX_FACTOR)
    fast, slow = rope.optional_number(None, "beta_fast") or 32.0, rope.optional_number(None, "beta_slow") or 1.0
    truncate = rope.boolean(None, "truncate", default=True)
    magnitude = rope.optional_number(None, "attention_factor")
    scale, scale_all = rope.optional_number(None, "mscale"), rope.optional_number(None, "mscale_all_dim")
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if scale and scale_all:
            magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, scale_all)
    return make_rope(yarn_frequencies(base, size, factor, original, fast, slow, truncate), "neox", magnitude)


def _config_longrope(rope: HyperParameters, base: float, size: int, original: int, sizes: Dimensions) -> Rope:
    name = "long_factor" if sizes.context_length > original else "short_factor"
    divisors = _config_divisors(rope, name, size // 2)
    factor = rope.number(None, "factor", default=sizes.trained_context_length / original, high=MAX_FACTOR)
    magnitude = rope.optional_number(None, "attention_factor") or longrope_magnitude(factor, max(original, 2))
    return make_rope(divided_frequencies(base, size, divisors), "neox", magnitude)


def config_parameters(hparams: HyperParameters, layer_type: str = "full_attention") -> HyperParameters:
    """`rope_parameters` (transformers 5), of one kind of layer if they differ, or the older `rope_scaling`."""
    for key in ("rope_parameters", "rope_scaling"):
        values: Any = hparams.raw(None, key)
        if values is None:
            continue
        if not isinstance(values, Mapping):
            raise hparams.malformed(None, key, "expected an object")
        inner = hparams.nested(key, values)
        if not any(isinstance(value, Mapping) for value in values.values()):
            return inner
        chosen = values.get(layer_type)
        if not isinstance(chosen, Mapping):
            raise inner.malformed(None, layer_type, "expected an object")
        return inner.nested(layer_type, chosen)
    return hparams.nested("rope_parameters", {})


def _config_original_context(hparams: HyperParameters, rope: HyperParameters, sizes: Dimensions) -> int:
    """The top level's value if there is one, then the rope's own, then the whole context, as in transformers."""
    inner = rope.integer(
        None, "original_max_position_embeddings", high=MAX_CONTEXT, default=sizes.trained_context_length
    )
    return hparams.integer(None, "original_max_position_embeddings", high=MAX_CONTEXT, default=inner)


def _config_divisors(rope: HyperParameters, name: str, count: int) -> NDArray[np.float32]:
    values = rope.raw(None, name)
    if not isinstance(values, list) or len(values) != count:
        raise rope.malformed(None, name, f"expected a list of {count} numbers")
    checked = [rope.checked_number(None, name, value) for value in values]
    return np.asarray(checked, dtype=np.float32)

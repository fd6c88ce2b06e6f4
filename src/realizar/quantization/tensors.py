"""A checkpoint's tensors by name, as sources: plain ones, and matrices that a format makes of several. numpy only.

`quantization_config` of `config.json` names a method of the latter by `quant_method`: a `MatrixFormat` with a line in
`MATRIX_FORMATS`. A model whose method has no line is refused by name. ModelOpt writes `hf_quant_config.json` beside it,
and older releases of it that alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.block_source import BlockSource, CopiedSource, Pages
from realizar.quantization.float_tensors import Fp8Tensors, ModelOptTensors
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from realizar.quantization.integer_tensors import AwqTensors, CompressedTensors, GptqTensors
from realizar.quantization.layout import WeightLayout
from realizar.quantization.matrix_format import MatrixFormat
from realizar.quantization.mxfp4_tensors import Mxfp4Tensors
from realizar.quantization.parts import number_of
from realizar.quantization.source import MatrixSource

_KEY = "quantization_config"
_MODEL_OPT = "hf_quant_config"


def stored_names(checkpoint: Checkpoint, name: str) -> Sequence[str]:
    """The names of the tensors that hold the tensor `name`: its own, but where a format makes it of others.

    A matrix of keys or values has the scales that they are divided by in a cache.
    """
    packed = _packed(checkpoint, name)
    names = (name,) if packed is None else packed.tensors(checkpoint, name)
    if not any(each in checkpoint.tensors for each in names):
        return names
    return *names, *(each for each in _cache_scales(name) if each in checkpoint.tensors)


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """True if a checkpoint has any of the tensors that hold the tensor `name`."""
    return any(each in checkpoint.tensors for each in stored_names(checkpoint, name))


def is_packed(checkpoint: Checkpoint, name: str) -> bool:
    return _packed(checkpoint, name) is not None


def tensor_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """However its numbers are stored; CheckpointError where it is made of tensors that do not fit together."""
    kind = _kind(checkpoint, name)
    return checkpoint.tensors[name].shape if kind is None else kind[1]


def tensor_layout(checkpoint: Checkpoint, name: str) -> WeightLayout:
    """The layout of a checkpoint's tensor, without its bytes.

    Raises:
        UnsupportedModelError: weights can't have its type.
        CheckpointError: it is made of tensors that do not fit together.
    """
    kind = _kind(checkpoint, name)
    return _plain_layout(checkpoint.tensors[name]) if kind is None else kind[0]


def stack_layout(checkpoint: Checkpoint, names: Sequence[str]) -> WeightLayout:
    """The layout that all matrices of a stack have, which may be one.

    Raises UnsupportedModelError where they have several, and as `tensor_layout` does.
    """
    first, *others = names
    layout = tensor_layout(checkpoint, first)
    for other in others:
        own = tensor_layout(checkpoint, other)
        if own != layout:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor '{other}' is of type {own.name}, and '{first}' of {layout.name}:"
                " experts of one layer must be of one type"
            )
    return layout


def tensor_source(checkpoint: Checkpoint, name: str, columns: int | None = None) -> MatrixSource:
    """A checkpoint's tensor as a matrix; raises as `tensor_layout` does.

    A vector is a matrix of one out_feature. The matrices of a stack lie one below the other: `expert_source` gives one.
    With a number of `columns` these are the last dimensions together.
    """
    packed = _packed(checkpoint, name)
    if packed is not None:
        return packed.source(checkpoint, name)
    stored = checkpoint.tensors[name]
    row_bytes = _plain_layout(stored).row_bytes(columns or stored.shape[-1])
    assert stored.ggml_type is not None  # else it has no layout
    raw = stored.data.reshape(-1, row_bytes)
    return BlockSource(stored.ggml_type, raw, stored.path, name, 0, Pages(stored, 0, row_bytes))


def expert_source(checkpoint: Checkpoint, name: str, expert: int, *, transposed: bool = False) -> MatrixSource:
    """One matrix of a stack [experts, out_features, in_features], or `transposed` [experts, in_features, out_features].

    Raises:
        UnsupportedModelError: weights can't have its type, or not lie transposed.
        ValueError: the tensor is not a stack, or has no such expert.
    """
    shape = tensor_shape(checkpoint, name)
    if len(shape) != 3:
        raise ValueError(f"tensor '{name}' of shape {shape} is not a stack of matrices")
    if not 0 <= expert < shape[0]:
        raise ValueError(f"tensor '{name}' has {shape[0]} experts, and not number {expert}")
    if transposed:
        return transposed_source(checkpoint.tensors[name], expert)
    return tensor_source(checkpoint, name).slice_out_features(expert * shape[1], (expert + 1) * shape[1])


def cache_scheme(checkpoint: Checkpoint) -> str | None:
    """`MatrixFormat.cache_scheme` of a checkpoint, None without a method; raises as `matrix_format`."""
    stored = matrix_format(checkpoint)
    return None if stored is None else stored.cache_scheme


def cache_scale(checkpoint: Checkpoint, name: str) -> float | None:
    """What a checkpoint divides keys or values in FP8 by, `name` being their matrix; None where it has no such scale.

    Raises CheckpointError where that is not one finite number above 0.
    """
    found = next((each for each in _cache_scales(name) if each in checkpoint.tensors), None)
    if found is None or cache_scheme(checkpoint) not in (None, "FP8"):
        return None
    return number_of(checkpoint.tensors[found])


def _cache_scales(name: str) -> tuple[str, ...]:
    """Names of a matrix' scale for the cache: ModelOpt's, and compressed-tensors'."""
    base = name.removesuffix(".weight")
    attention, _, part = base.rpartition(".")
    places = (base, attention) if part in ("k_proj", "v_proj") else ()
    return tuple(f"{place}.{part[0]}_scale" for place in places)


def _packed(checkpoint: Checkpoint, name: str) -> MatrixFormat | None:
    stored_format = matrix_format(checkpoint)
    return stored_format if stored_format is not None and stored_format.tensors(checkpoint, name) else None


def _kind(checkpoint: Checkpoint, name: str) -> tuple[WeightLayout, tuple[int, ...]] | None:
    """Layout and shape of a matrix that a format makes of several tensors, found once; None of a plain one.

    A mixture has tens of thousands, which checks, plans and loads look up again and again.
    """
    found = _method(checkpoint).kinds
    if name not in found:
        packed = _packed(checkpoint, name)
        found[name] = None if packed is None else (
            packed.source(checkpoint, name).layout, packed.shape(checkpoint, name)
        )  # fmt: skip
    return found[name]


def _plain_layout(stored: StoredTensor) -> WeightLayout:
    layout = None if stored.ggml_type is None else GGML_LAYOUTS.get(stored.ggml_type)
    if layout is None:
        raise UnsupportedModelError(
            f"{stored.path}: tensor '{stored.name}': weights of type {stored.type_name} are not supported"
        )
    return layout


def transposed_source(stored: StoredTensor, index: int = 0) -> CopiedSource:
    """A matrix that a checkpoint stores as [in_features, out_features], or one of a stack of them.

    Raises UnsupportedModelError where its numbers are not plain, so that columns can't be told apart.
    """
    layout = _plain_layout(stored)
    if stored.ggml_type is None or not layout.is_float:
        raise UnsupportedModelError(
            f"{stored.path}: tensor '{stored.name}': weights of type {stored.type_name} can't lie transposed"
        )
    *_, rows, columns = stored.shape
    size = rows * columns * layout.block_bytes
    part = stored.part(index * size, (index + 1) * size)
    numbers = part.data.view(f"<u{layout.block_bytes}").reshape(rows, columns)

    def make(out_features: NDArray[Any]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(out_features).view(np.uint8)

    return CopiedSource(stored.ggml_type, rows, [numbers.T], make, stored.path, stored.name, Pages(part))


MATRIX_FORMATS: dict[str, type[MatrixFormat]] = {
    "auto-round": GptqTensors, "awq": AwqTensors, "compressed-tensors": CompressedTensors, "fp8": Fp8Tensors,
    "gptq": GptqTensors, "modelopt": ModelOptTensors, "mxfp4": Mxfp4Tensors, "mxfp8": Fp8Tensors,
}  # fmt: skip
"""The format of each `quant_method`."""


@dataclass(frozen=True, slots=True)
class _Method:
    """What is known of a checkpoint's matrices. Attributes: format: as of `matrix_format`. kinds: as of `_kind`."""

    format: MatrixFormat | None
    kinds: dict[str, tuple[WeightLayout, tuple[int, ...]] | None]


_methods: WeakKeyDictionary[Checkpoint, _Method] = WeakKeyDictionary()


def matrix_format(checkpoint: Checkpoint) -> MatrixFormat | None:
    """The format that a checkpoint's configuration names, made once; None where its tensors are plain.

    Raises:
        UnsupportedModelError: no format reads the method, or it refuses a parameter.
        CheckpointError: the configuration is malformed, or two files name two.
    """
    return _method(checkpoint).format


def _method(checkpoint: Checkpoint) -> _Method:
    found = _methods.get(checkpoint)
    if found is None:
        found = _methods[checkpoint] = _Method(_make_format(checkpoint), {})
    return found


def _make_format(checkpoint: Checkpoint) -> MatrixFormat | None:
    config, beside = _quantization_config(checkpoint), _model_opt_config(checkpoint)
    if not config:
        return ModelOptTensors(beside, _model_opt_path(checkpoint), "quantization") if beside else None
    path = checkpoint.path / "config.json"
    if not isinstance(config, Mapping):
        raise CheckpointError(path, f"key '{_KEY}'", "is not an object")
    method = config.get("quant_method")
    if not isinstance(method, str):
        raise CheckpointError(path, f"key '{_KEY}.quant_method'", "missing, or not a text")
    if method not in MATRIX_FORMATS:
        known = ", ".join(["float weights", *sorted(MATRIX_FORMATS)])
        raise UnsupportedModelError(
            f"{path}: key '{_KEY}.quant_method': weights quantised by {shown(method)} are not supported"
            f" (supported in safetensors: {known}; quantised models run from GGUF files)"
        )
    if beside and (named := _algorithm(config)) != (other := _algorithm(beside)):
        raise CheckpointError(path, f"key '{_KEY}'", f"names {named}, and {_MODEL_OPT}.json {other}")
    return MATRIX_FORMATS[method]({**(beside or {}), **config}, path)


def asks_for_fp8(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint asks for activations in FP8; raises as `matrix_format`."""
    stored = matrix_format(checkpoint)
    return stored is not None and stored.fp8_activations


def _quantization_config(checkpoint: Checkpoint) -> Any:
    whole = checkpoint.metadata.get("config") if checkpoint.format == "safetensors" else None
    if not isinstance(whole, Mapping):
        return None
    text = whole.get("text_config")
    return (text.get(_KEY) if isinstance(text, Mapping) else None) or whole.get(_KEY)


def _model_opt_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """What ModelOpt's own file says, under the keys of a `quantization_config`; None without the file."""
    whole = checkpoint.metadata.get(_MODEL_OPT) if checkpoint.format == "safetensors" else None
    if whole is None:
        return None
    config = whole.get("quantization")
    if not isinstance(config, Mapping):
        raise CheckpointError(_model_opt_path(checkpoint), "key 'quantization'", "missing, or not an object")
    return {**config, "quant_method": "modelopt"}


def _model_opt_path(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / f"{_MODEL_OPT}.json"


def _algorithm(config: Mapping[str, Any]) -> str:
    return " ".join(shown(str(config[key])) for key in ("quant_method", "quant_algo") if key in config)

"""Matrices that a method stores as a few tensors of one module: codes, scales and what else it has. numpy only."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.convert import dequantize
from realizar.quantization.layout import WeightLayout
from realizar.quantization.matrix_format import MatrixFormat
from realizar.quantization.source import MatrixSource

_LISTS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")
GROUPS = (128, 64, 32)  # of a layout; a stored group of more columns is several of them
Parts = Mapping[str, StoredTensor]
"""The tensors of a matrix as its method names them."""


class PartsSource(MatrixSource):
    def __init__(self, layout: WeightLayout, out_features: int, in_features: int, name: str, parts: Parts) -> None:
        super().__init__(layout, out_features, in_features, parts["scales"].path, name)
        self.parts = parts

    def prefetch(self) -> None:
        for each in self.parts.values():
            each.prefetch()

    def release(self, start: int, stop: int) -> None:
        if stop == self.out_features:  # a run's codes may lie on all pages
            for each in self.parts.values():
                each.release()


class PartsFormat(MatrixFormat):
    """A method whose matrices are stored under their own names with other suffixes."""

    known: frozenset[str]

    def __init__(self, config: Mapping[str, Any], path: Path, key: str = "quantization_config") -> None:
        super().__init__(config, path, key)
        stated = {key for key, value in config.items() if value is not None}
        unknown = sorted(stated - self.known - {"quant_method"})
        if unknown:
            raise self.unsupported(unknown[0])

    def tensors(self, checkpoint: Checkpoint, name: str) -> Sequence[str]:
        base = name.removesuffix(".weight")
        names = [base + suffix for suffix in self.suffixes(checkpoint, base).values()]
        return names if any(each in checkpoint.tensors for each in names) else ()

    def parts(self, checkpoint: Checkpoint, name: str) -> Parts:
        base = name.removesuffix(".weight")
        return {part: checkpoint.tensors[base + suffix] for part, suffix in self.suffixes(checkpoint, base).items()}

    @abstractmethod
    def suffixes(self, checkpoint: Checkpoint, base: str) -> Mapping[str, str]:
        """What each tensor of a matrix has behind the name of its module."""

    @staticmethod
    def there(checkpoint: Checkpoint, base: str, **suffixes: str) -> dict[str, str]:
        """Those of some parts, by name, whose tensors a checkpoint has."""
        return {part: suffix for part, suffix in suffixes.items() if base + suffix in checkpoint.tensors}

    def check(self, checkpoint: Checkpoint) -> None:
        """Compare the lists of modules that are stored as plain tensors, but for their patterns, which are not run.

        Raises CheckpointError: one of them is stored by the method, or a list has no name of this checkpoint.
        """
        modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
        parts = {part for name in checkpoint.tensors for part in name.split(".")}
        for key in _LISTS:
            place, listed = f"key '{self.key}.{key}'", self.config.get(key) or []
            if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
                raise CheckpointError(self.path, place, "is no list of texts")
            if listed and not any(_may_name(each, parts) for each in listed):
                raise CheckpointError(self.path, place, f"names nothing of this checkpoint: {shown(listed[0])}")
            names, starts = set(listed), tuple(each[:-1] for each in listed if each.endswith("*"))
            for module in sorted(modules):
                named = module.startswith(starts) or not names.isdisjoint(_with_parents(module))
                if named and self.tensors(checkpoint, f"{module}.weight"):
                    raise CheckpointError(self.path, place, f"names {shown(module)}, which is stored quantised")

    def unsupported(self, key: str, why: str = "") -> UnsupportedModelError:
        value = self.config.get(key)
        reason = why or (f"unsupported value {value!r:.40}" if key in self.known else "unknown")
        return UnsupportedModelError(f"{self.path}: key '{self.key}.{key}': {reason}")


def _may_name(listed: str, parts: Iterable[str]) -> bool:
    """True of a name whose last part is one of `parts`, of a pattern, and of a head, which may be tied."""
    if listed.startswith("re:") or "lm_head" in listed:
        return True
    last = listed.strip("*.").rpartition(".")[2]
    return any(each.startswith(last) if "*" in listed else each == last for each in parts)


def _with_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def array_of(stored: StoredTensor, dtype: Any) -> Any:
    return stored.data.view(dtype).reshape(stored.shape)


def floats_of(stored: StoredTensor, part: Any) -> NDArray[np.float32]:
    """A part of a matrix, by its index: no more than that is read."""
    assert stored.ggml_type is not None  # `matrix_shape` refuses others
    numbers = np.ascontiguousarray(array_of(stored, f"<u{stored.ggml_type.type_size}")[part])
    return dequantize(stored.ggml_type, numbers.reshape(-1).view(np.uint8), *numbers.shape)


def finite_in_halves(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales as they are, for kernels that round them to float16; infinite, and so refused, where that has no such."""
    with np.errstate(over="ignore"):
        return np.where(np.isinf(scales.astype(np.float16)), np.float32(np.inf), scales)


def number_of(stored: StoredTensor) -> float:
    """Its one number; CheckpointError where it has others, or one that is not finite and above 0."""
    if math.prod(stored.shape) != 1:
        raise wrong(stored, f"has the shape {stored.shape}, and not one number")
    single = replace(stored, shape=(1, 1))
    matrix_shape(single)
    value = float(floats_of(single, np.s_[:])[0, 0])
    if not math.isfinite(value) or value <= 0:
        raise wrong(stored, f"is {value}, and not a finite number above 0")
    return value


def wrong(stored: StoredTensor, reason: str) -> CheckpointError:
    return CheckpointError(stored.path, f"tensor {shown(stored.name)}", reason)


def matrix_shape(stored: StoredTensor, dtype: str = "") -> tuple[int, int]:
    """The shape of a matrix of a type, or without one of floats; CheckpointError of others."""
    floats = GGMLType.F16, GGMLType.BF16, GGMLType.F32
    if stored.dtype != dtype if dtype else stored.ggml_type not in floats:
        raise wrong(stored, f"is of type {stored.type_name}, and not {dtype or 'of floats'}")
    if len(stored.shape) != 2:
        raise wrong(stored, f"has the shape {stored.shape}, and is not a matrix")
    return stored.shape[0], stored.shape[1]


def check_shape(stored: StoredTensor, shape: tuple[int, ...], dtype: str = "") -> None:
    if dtype and stored.dtype != dtype:
        raise wrong(stored, f"is of type {stored.type_name}, and not {dtype}")
    if stored.shape != shape:
        raise wrong(stored, f"has the shape {stored.shape}, and not {shape}")

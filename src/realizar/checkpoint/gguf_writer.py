"""`write_gguf`: GGUF files for generated models, benchmarks and tests. numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC
from realizar.checkpoint.gguf_metadata import ValueType

_KINDS: dict[np.dtype[np.generic], ValueType] = {
    **{kind.dtype: kind for kind in ValueType if kind.layout.size and kind is not ValueType.BOOL},
    np.dtype(np.bool_): ValueType.BOOL,
}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write, of a shape with the slowest dimension first.

    `data` is any contiguous array of the right size in bytes, or a function that makes it when its turn comes, so that
    a large model need not be in memory at once.
    """

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.generic] | Callable[[], NDArray[np.generic]]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) // self.ggml_type.block_size * self.ggml_type.type_size


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[NewTensor] = (),
    *,
    version: int = 3,
    alignment: int | None = None,
) -> None:
    """Writes a little-endian GGUF file.

    Args:
        metadata: values by key. numpy scalars and arrays keep their type. Of plain Python an int becomes uint32, or
            int32 where negative (64 bits where it must), a float float32, a list of ints or floats an array of int32
            or float32; strings, bools, and lists of strings and of lists are themselves; an empty list holds strings.
        alignment: of each tensor's data, written as `general.alignment`; without it that key of `metadata`, else 32.

    Raises:
        ValueError: a tensor's data does not have the size that its shape and type ask for.
        TypeError: a metadata value that GGUF has no type for.
    """
    with path.open("wb") as stream:
        stream.write(gguf_header(metadata, tensors, version=version, alignment=alignment))
        _write_data(stream, tensors, _step(metadata, alignment))


def gguf_header(
    metadata: Mapping[str, Any], tensors: Sequence[NewTensor], *, version: int = 3, alignment: int | None = None
) -> bytes:
    """What `write_gguf` writes before the tensors' data, padded to the alignment where there are any."""
    pairs = dict(metadata)
    if alignment is not None:
        pairs[ALIGNMENT_KEY] = alignment
    step = _step(metadata, alignment)
    header = bytearray(MAGIC + struct.pack("<IQQ", version, len(tensors), len(pairs)))
    for key, value in pairs.items():
        kind, payload = _encode(value)
        header += _encode_string(key) + struct.pack("<I", kind) + payload
    offset = 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        header += _encode_string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        header += struct.pack("<IQ", tensor.ggml_type, offset)
        offset += _padded(tensor.size_bytes, step)
    return bytes(header) + bytes(_padded(len(header), step) - len(header) if tensors else 0)


def _step(metadata: Mapping[str, Any], alignment: int | None) -> int:
    return int(metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)) if alignment is None else alignment


def _write_data(stream: BinaryIO, tensors: Iterable[NewTensor], alignment: int) -> None:
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.data() if callable(tensor.data) else tensor.data)
        if data.nbytes != tensor.size_bytes:
            raise ValueError(f"tensor {tensor.name!r}: {data.nbytes} bytes of data instead of {tensor.size_bytes}")
        stream.write(data.reshape(-1).view(np.uint8).data)
        stream.write(bytes(_padded(data.nbytes, alignment) - data.nbytes))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _encode_string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _encode(value: Any) -> tuple[ValueType, bytes]:
    if isinstance(value, str):
        return ValueType.STRING, _encode_string(value)
    if isinstance(value, np.ndarray | list | tuple):
        return ValueType.ARRAY, _encode_array(value)
    if isinstance(value, np.generic):
        kind, value = _kind_of(value.dtype), value.item()
    elif isinstance(value, bool):
        kind = ValueType.BOOL
    elif isinstance(value, int):
        kind = _narrowest(value)
    elif isinstance(value, float):
        kind = ValueType.FLOAT32
    else:
        raise TypeError(f"GGUF has no type for a value of {type(value).__name__}")
    return kind, kind.layout.pack(value)


def _kind_of(dtype: np.dtype[np.generic]) -> ValueType:
    kind = _KINDS.get(dtype)
    if kind is None:
        raise TypeError(f"GGUF has no type for values of {dtype.name}")
    return kind


def _narrowest(value: int) -> ValueType:
    if value < 0:
        return ValueType.INT32 if value >= -(1 << 31) else ValueType.INT64
    return ValueType.UINT32 if value < 1 << 32 else ValueType.UINT64


def _encode_array(values: NDArray[np.generic] | Sequence[Any]) -> bytes:
    if isinstance(values, np.ndarray):
        kind = _kind_of(values.dtype)
        return struct.pack("<IQ", kind, values.size) + np.ascontiguousarray(values, kind.dtype).tobytes()
    if not values or isinstance(values[0], str):
        body = b"".join(_encode_string(text) for text in values)
        return struct.pack("<IQ", ValueType.STRING, len(values)) + body
    if isinstance(values[0], np.ndarray | list | tuple):
        return struct.pack("<IQ", ValueType.ARRAY, len(values)) + b"".join(_encode_array(inner) for inner in values)
    if isinstance(values[0], bool):
        return _encode_array(np.array(values, np.bool_))
    return _encode_array(np.array(values, np.float32 if any(isinstance(v, float) for v in values) else np.int32))

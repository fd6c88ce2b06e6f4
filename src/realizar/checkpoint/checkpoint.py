"""`Checkpoint`: the contents of a GGUF file or a safetensors folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.mapped_file import MappedFile


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in its file.

    Attributes:
        ggml_type: element type; safetensors' BF16, F16 and F32 have ggml ids too. None without one (fp8, unsigned).
        shape: slowest dimension first, so a matrix is (out_features, cols).
        data: uint8 [size in bytes], a view of the mapped file; each out_feature is a run of blocks.
        path, offset: the file and the absolute offset of the first byte in it.
        dtype: safetensors' name of the element type; empty in a GGUF file.
        file: the mapped file; None for a tensor that is in memory alone.
    """

    name: str
    ggml_type: GGMLType | None
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    path: Path
    offset: int
    dtype: str = ""
    file: MappedFile | None = field(default=None, repr=False)

    @property
    def type_name(self) -> str:
        return self.dtype if self.ggml_type is None else self.ggml_type.name

    @property
    def size_bytes(self) -> int:
        return int(self.data.size)

    def part(self, start: int, stop: int) -> StoredTensor:
        """The bytes from `start` to `stop`."""
        return replace(self, data=self.data[start:stop], offset=self.offset + start)

    def release(self) -> None:
        """Advise the system that the mapped pages are not needed for now; the view stays valid."""
        if self.file is not None:
            self.file.release(self.offset, self.size_bytes)

    def prefetch(self) -> None:
        """Ask the system to read the bytes ahead, without waiting for them."""
        if self.file is not None:
            self.file.prefetch(self.offset, self.size_bytes)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """Metadata and tensors of one model; equal to itself alone.

    Attributes:
        path: the GGUF file (its first part) or the safetensors folder.
        metadata: GGUF key to value (arrays are lists, or numpy arrays for numbers); for safetensors the parsed JSON
            files by stem: `config`, `generation_config`, `tokenizer_config` and `preprocessor_config`, and
            `chat_templates` by name.
        tensors: by name in the file.
        tokenizer_path: `tokenizer.json` of a safetensors folder, else None.
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    tokenizer_path: Path | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        """As its files name it, or `unknown`."""
        if self.format == "gguf":
            return str(self.metadata.get("general.architecture", "unknown"))
        config = self.metadata.get("config")
        return str(config.get("model_type", "unknown")) if isinstance(config, dict) else "unknown"

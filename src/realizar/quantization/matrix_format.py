"""`MatrixFormat`: matrices that a safetensors checkpoint stores as several tensors, or in codes. numpy only.

A method is a subclass in a file of its own, with a line in `MATRIX_FORMATS` of `tensors.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.quantization.source import MatrixSource


class MatrixFormat(ABC):
    """One method, with its parameters; `path` and `key` are the file and the key that have them, for errors.

    Raises:
        UnsupportedModelError: a parameter has a value that the format does not express.
        CheckpointError: a parameter is missing or malformed.
    """

    def __init__(self, config: Mapping[str, Any], path: Path, key: str = "quantization_config") -> None:
        self.config, self.path, self.key = config, path, key

    @property
    def fp8_activations(self) -> bool:
        """True if the method multiplies all its matrices by activations in FP8 (e4m3)."""
        return False

    @property
    def cache_scheme(self) -> str | None:
        """What keys and values were meant to be kept in: `FP8`, with a scale for a layer's, or another; None: as is."""
        scheme = self.config.get("kv_cache_scheme") or self.config.get("kv_cache_quant_algo")
        if not isinstance(scheme, Mapping):
            return "FP8" if scheme == "static" else scheme and str(scheme)  # so AutoFP8 names it
        kind, bits, strategy = (scheme.get(key) for key in ("type", "num_bits", "strategy"))
        if (kind, bits) == ("float", 8) and strategy in (None, "tensor"):
            return "FP8"
        return f"{kind} of {bits} bits by {strategy}"

    @abstractmethod
    def tensors(self, checkpoint: Checkpoint, name: str) -> Sequence[str]:
        """The names of all tensors that make up the matrix `name`; none where it is stored as a plain tensor.

        A name that the checkpoint lacks is reported as missing.
        """

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError where what the method says of modules is not so in the checkpoint."""
        return

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        """The shape of the weights: of a matrix, or of a stack whose matrices lie one below the other in the source.

        Raises CheckpointError as `source` does.
        """
        source = self.source(checkpoint, name)
        return source.out_features, source.in_features

    @abstractmethod
    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        """The matrix `name`, whose tensors are all there; its shape is that of the weights, not of the tensors.

        Raises CheckpointError where the tensors' types or shapes do not fit together.
        """

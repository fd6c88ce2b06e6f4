"""`MatrixFormat`: matrices that a safetensors checkpoint stores as several tensors, or in codes. numpy only.

`quantization_config` of `config.json` names a method by `quant_method`. A method is a subclass of `MatrixFormat` in a
file of its own, with a line in `MATRIX_FORMATS`. A model whose method has no line is refused by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.source import MatrixSource

_KEY = "quantization_config"


class MatrixFormat(ABC):
    """One method, with the parameters of a model's `quantization_config`; `path` is `config.json`, for errors.

    Raises:
        UnsupportedModelError: a parameter has a value that the format does not express.
        CheckpointError: a parameter is missing or malformed.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config, self.path = config, path

    @abstractmethod
    def tensors(self, checkpoint: Checkpoint, name: str) -> Sequence[str]:
        """The names of all tensors that make up the matrix `name`; none where it is stored as a plain tensor.

        A name that the checkpoint lacks is reported as missing.
        """

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


MATRIX_FORMATS: dict[str, type[MatrixFormat]] = {}
"""The format of each `quant_method`."""


def matrix_format(checkpoint: Checkpoint) -> MatrixFormat | None:
    """The format that a checkpoint's `quantization_config` names; None where its tensors are plain.

    Raises:
        UnsupportedModelError: no format reads the method, or it refuses a parameter.
        CheckpointError: the configuration is malformed.
    """
    config = _quantization_config(checkpoint)
    if not config:
        return None
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
    return MATRIX_FORMATS[method](config, path)


def _quantization_config(checkpoint: Checkpoint) -> Any:
    whole = checkpoint.metadata.get("config") if checkpoint.format == "safetensors" else None
    if not isinstance(whole, Mapping):
        return None
    text = whole.get("text_config")
    return (text.get(_KEY) if isinstance(text, Mapping) else None) or whole.get(_KEY)

"""MXFP4 as safetensors files of gpt-oss store it: codes and scales in tensors of their own. numpy only.

`NAME_blocks`, uint8 [experts, out_features, groups, 16], has the codes of 32 columns a group, byte j those of columns
2 j (low bits) and 2 j + 1; `NAME_scales`, uint8 [experts, out_features, groups], an exponent each. ggml's blocks hold
the same numbers in another order: byte j has columns j and j + 16. Sources give these, so that all else is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.block_source import CopiedSource, Pages, ggml_layout
from realizar.quantization.finite import LEAST_INFINITE_E8M0
from realizar.quantization.matrix_format import MatrixFormat
from realizar.quantization.source import MatrixSource

_LAYOUT = ggml_layout(GGMLType.MXFP4)
_HALF = _LAYOUT.block_size // 2
_KEYS = frozenset({"quant_method", "modules_to_not_convert", "dequantize"})


class Mxfp4Tensors(MatrixFormat):
    """The method `mxfp4`: stacks of experts, whose matrices lie one below the other in a source."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        unknown = sorted(set(config) - _KEYS)
        if unknown:
            raise UnsupportedModelError(f"{path}: key 'quantization_config.{unknown[0]}': unknown for mxfp4")

    def tensors(self, checkpoint: Checkpoint, name: str) -> Sequence[str]:
        both = f"{name}_blocks", f"{name}_scales"
        return both if any(each in checkpoint.tensors for each in both) else ()

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        blocks, _ = self._stored(checkpoint, name)
        experts, out_features, groups, _ = blocks.shape
        return experts, out_features, groups * _LAYOUT.block_size

    def source(self, checkpoint: Checkpoint, name: str) -> MatrixSource:
        return mxfp4_source(name, *self._stored(checkpoint, name))

    def _stored(self, checkpoint: Checkpoint, name: str) -> tuple[StoredTensor, StoredTensor]:
        """Codes and scales; CheckpointError where they do not fit together."""
        blocks, scales = (checkpoint.tensors[each] for each in self.tensors(checkpoint, name))
        for stored in (blocks, scales):
            if stored.type_name != "U8":
                reason = f"is of type {stored.type_name}, and codes of MXFP4 are of U8"
                raise CheckpointError(stored.path, f"tensor {shown(stored.name)}", reason)
        if len(blocks.shape) != 4 or blocks.shape[3] != _HALF:
            reason = f"has the shape {blocks.shape}, and not [experts, out_features, groups, {_HALF}]"
            raise CheckpointError(blocks.path, f"tensor {shown(blocks.name)}", reason)
        if scales.shape != blocks.shape[:3]:
            reason = f"has the shape {scales.shape}, and the codes are of {blocks.shape}"
            raise CheckpointError(scales.path, f"tensor {shown(scales.name)}", reason)
        return blocks, scales


def mxfp4_source(name: str, blocks: StoredTensor, scales: StoredTensor) -> MatrixSource:
    """A matrix, or several one below the other, of codes and of scales [..., out_features, groups]."""
    groups = scales.shape[-1]
    codes = blocks.data.reshape(-1, groups, _HALF)
    stored = codes, scales.data.reshape(-1, groups), np.arange(len(codes))
    pages = Pages(blocks, 0, groups * _HALF)
    return _Mxfp4Source(GGMLType.MXFP4, groups * _LAYOUT.block_size, stored, _blocks, blocks.path, name, pages)


class _Mxfp4Source(CopiedSource):
    """Some out_features of such tensors, by codes, scales and their numbers in the tensors, as ggml blocks of MXFP4."""

    def find_not_finite(self, start: int, stop: int) -> str | None:
        _, scales, places = self.stored
        found = np.argwhere(scales[start:stop] >= LEAST_INFINITE_E8M0)
        if not len(found):
            return None
        out_feature, group = found[0].tolist()
        return f"the scale of group {group} of out_feature {places[start + out_feature]} is not finite"


def _blocks(codes: NDArray[np.uint8], scales: NDArray[np.uint8], _places: NDArray[np.intp]) -> NDArray[np.uint8]:
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], 2, _HALF)  # [..., half, column]
    blocks = np.empty((*codes.shape[:2], _LAYOUT.block_bytes), np.uint8)
    blocks[..., 0] = scales
    blocks[..., 1:] = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    return blocks.reshape(len(codes), -1)

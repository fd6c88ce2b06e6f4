"""Blocks behind a model's layers that draft the next tokens (MTP): known, and not run. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from realizar.models.dimensions import MAX_LAYERS, Dimensions
from realizar.models.hyper_parameters import HyperParameters

_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\..+")
_APART = ("mtp.", "model.mtp.")


def read_next_token_blocks(hparams: HyperParameters, hf_key: str) -> int:
    """Their number. transformers 5 may write `num_mtp_layers` for the key of published configurations."""
    either = hparams.integer(None, "num_mtp_layers", low=0, high=MAX_LAYERS, default=0)
    return hparams.integer("nextn_predict_layers", hf_key, low=0, high=MAX_LAYERS, default=either)


def without_next_token_blocks(hparams: HyperParameters, sizes: Dimensions, number: int) -> Dimensions:
    """The sizes of the layers that are run: GGUF counts those blocks too. Raises CheckpointError where none is left."""
    if not hparams.is_gguf:
        return sizes
    if number >= sizes.num_layers:
        raise hparams.malformed("nextn_predict_layers", None, f"{number} of {sizes.num_layers} layers")
    return replace(sizes, num_layers=sizes.num_layers - number)


def next_token_tensors(sizes: Dimensions, number: int) -> Callable[[str], bool]:
    """Tells the tensors of those blocks, which lie in layers behind the model's or by themselves."""

    def is_of_block(name: str) -> bool:
        layer = _LAYER.fullmatch(name)
        beyond = layer is not None and sizes.num_layers <= int(layer.group(1)) < sizes.num_layers + number
        return beyond or name.startswith(_APART)

    return is_of_block

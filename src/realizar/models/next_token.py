"""Blocks behind a model's layers that draft the next tokens (MTP): known to a model, and described by themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.dimensions import MAX_LAYERS, Dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Linear, NextTokenInputs
from realizar.models.spec import AnyFeedForward, Attention, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorSource

_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\..+")
_APART = ("mtp.", "model.mtp.")
_APART_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
"""Qwen's names in safetensors, after `mtp.`; all others lie in `mtp.layers.0.`."""
_PROJECTION = re.compile(r"(?:model\.layers\.\d+\.|blk\.\d+\.nextn\.)eh_proj\.weight|(?:model\.)?mtp\.fc\.weight")
SHORTLIST = 1 << 15
"""Ids that a block of a large vocabulary drafts: the first ones, which are the most frequent where merges made them."""

_FIRST_LAYER = re.compile(r"(?:blk|(?:\w+\.)*layers)\.0\..+")


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


def has_next_token_block(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint has the tensors of one, whatever its keys say: many fine-tuned models dropped them."""
    return any(_PROJECTION.fullmatch(name) is not None for name in checkpoint.tensors)


def is_next_token_file(checkpoint: Checkpoint) -> bool:
    """True for a file of a next-token block alone, with the embedding and head of the model that it drafts for."""
    return has_next_token_block(checkpoint) and not any(map(_FIRST_LAYER.fullmatch, checkpoint.tensors))


def apart_names(hparams: HyperParameters, sizes: Dimensions) -> Callable[[str], str]:
    """What `SpecBuilder` renames for a block whose tensors lie apart in safetensors."""
    if hparams.is_gguf or not hparams.drafts:
        return str
    layer = re.compile(rf"(?:\w+\.)*layers\.{sizes.num_layers}\.(.+)")
    prefix = next((each for each in _APART if f"{each}fc.weight" in hparams.checkpoint.tensors), _APART[0])

    def rename(name: str) -> str:
        found = layer.fullmatch(name)
        return name if found is None else prefix + _APART_NAMES.get(found[1], f"layers.0.{found[1]}")

    return rename


def next_token_block(
    builder: SpecBuilder, number: int, attention: Callable[[int], Attention],
    feed_forward: Callable[[int], AnyFeedForward], *, tied_by_default: bool,
) -> ModelSpec:  # fmt: skip
    """The block behind a model's layers, whose parts are given by index; `number` of them are there as keys say.

    Embedding, final norm and head are the model's where it has none. UnsupportedModelError: there are several blocks.
    """
    hparams, index = builder.hparams, builder.sizes.num_layers
    if number > 1:
        raise UnsupportedModelError(f"{hparams.path}: it has {number} next-token blocks, and models with one can draft")
    base = f"model.layers.{index}"
    layers = builder.layers(attention, feed_forward, indices=(index,))
    halves = token_and_state(builder, f"{base}.eh_proj", builder.sizes.hidden_size)
    inputs = NextTokenInputs(builder.norm(f"{base}.enorm"), builder.norm(f"{base}.hnorm"), *halves)
    is_of_block = next_token_tensors(builder.sizes, 1)
    spec = builder.spec(layers, tied_by_default=tied_by_default, is_ignored=lambda name: not is_of_block(name))
    vocabulary, hidden = spec.vocab_size, spec.hidden_size
    if builder.has(f"{base}.embed_tokens.weight"):
        own = builder.linear(f"{base}.embed_tokens", vocabulary, hidden, bias=False)
        spec = replace(spec, embedding=own.weight)
    if builder.has(f"{base}.shared_head.norm.weight"):
        spec = replace(spec, final_norm=builder.norm(f"{base}.shared_head.norm"))
    if builder.has(f"{base}.shared_head.head.weight"):
        spec = replace(spec, head=builder.linear(f"{base}.shared_head.head", vocabulary, hidden, bias=False))
    return replace(spec, next_token=inputs).with_own_tensors()


def with_shortlist(block: ModelSpec, count: int = SHORTLIST) -> ModelSpec:
    """The block with a head for the first ids alone, where there are more than twice as many; it reads all."""
    if block.vocab_size <= 2 * count or block.head.bias is not None:
        return block
    name = f"{block.head.weight}.first"
    part = block.tensors[block.head.weight].cut(rows=[(0, count)])
    head = Linear(name, count, block.hidden_size)
    tensors = {**block.tensors, name: part}
    return replace(block, vocab_size=count, head=head, tensors=tensors).with_own_tensors()


def token_and_state(builder: SpecBuilder, base: str, width: int) -> list[Linear]:
    """The matrices of an embedding and of a hidden state of a width, side by side in one tensor, in this order."""
    hidden = builder.sizes.hidden_size
    whole = TensorSource(builder.stored_name(f"{base}.weight"), (hidden, 2 * width))
    halves = []
    for part, first in (("token", 0), ("state", width)):
        half = whole.cut(columns=[(first, first + width)])
        halves.append(Linear(builder.note(f"{base}.{part}.weight", half), hidden, width))
    return halves

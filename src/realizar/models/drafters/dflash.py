"""DFlash: a drafter of a few layers that reads streams of its model, and drafts a whole block at once. numpy only.

Published as folders in Qwen3's names, and as GGUF files of llama.cpp. Embedding and head are those of its model. Its
successors, which have convolutions, a selector of candidates, or a Markov head, have tensors and keys that are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.dimensions import MAX_LAYERS, MAX_WIDTH, read_dimensions
from realizar.models.drafters.drafter_files import config_of, has_head, refuse_windows, with_model_tensors
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import BlockInputs, Fusion
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

_NAME = "dflash"
_CLASS = "DFlashDraftModel"
_USUAL_SIZE, _MOST_TOKENS = 16, 1 << 10
_GGUF_NAMES = {"model.fc": "fc", "model.hidden_norm": "enc.output_norm"}
_OF_TRAINING = frozenset({"tie_word_embeddings", "num_target_layers"})


def is_dflash(checkpoint: Checkpoint) -> bool:
    if checkpoint.format == "gguf":
        return checkpoint.metadata.get("general.architecture") == _NAME
    classes = config_of(checkpoint).get("architectures")
    return isinstance(classes, list) and _CLASS in classes


def build_dflash(checkpoint: Checkpoint, model: ModelSpec, of_model: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """Describe a drafter for a model, and give its checkpoint with the tensors that it takes of the model's.

    Raises:
        UnsupportedModelError: a key value that this program can't honour, or a model whose tensors it can't take.
        CheckpointError: a hyper-parameter is missing, of the wrong type, or absurd.
    """
    whole = with_model_tensors(checkpoint, model, of_model)
    config = {key: value for key, value in config_of(checkpoint).items() if key not in _OF_TRAINING}
    hparams = HyperParameters(whole, _NAME, {**config, "tie_word_embeddings": not has_head(whole)})
    sizes = read_dimensions(hparams, defaults={"max_position_embeddings": model.context_length})
    sizes = replace(sizes, context_length=model.context_length)
    builder = SpecBuilder(hparams, sizes, gguf_names=_GGUF_NAMES, rename=lambda name: name.removeprefix("model."))
    inputs, rope = _inputs(builder), read_rope(hparams, sizes)
    refuse_windows(hparams, sizes.num_layers)
    hparams.only(None, "rope_is_neox_style", True)
    sections = hparams.raw("rope.dimension_sections", None)
    if sections is not None and any(list(sections)[1:]):
        raise hparams.unsupported("rope.dimension_sections", None, list(sections))
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, qk_norm="head"), lambda index: builder.feed_forward(index)
    )
    spec = builder.spec(layers, tied_by_default=False, is_causal=False)
    return replace(spec, next_token=inputs), whole


def _inputs(builder: SpecBuilder) -> BlockInputs:
    """GGUF's layers are those that read the streams, and a folder's those that leave them.

    Some folders have the keys of `dflash_config` outside.
    """
    hparams, hidden, vocabulary = builder.hparams, builder.sizes.hidden_size, builder.sizes.vocab_size
    if hparams.is_gguf:
        own, first, mask_id = hparams, 1, hparams.checkpoint.metadata.get("tokenizer.ggml.mask_token_id")
        size = hparams.integer("block_size", None, low=2, high=_MOST_TOKENS, default=_USUAL_SIZE)
    else:
        nested = hparams.raw(None, "dflash_config")
        own, first = hparams.nested("dflash_config", nested) if isinstance(nested, Mapping) else hparams, 0
        size = hparams.integer(None, "block_size", low=2, high=_MOST_TOKENS, default=_USUAL_SIZE)
        size = own.integer(None, "block_size", low=2, high=_MOST_TOKENS, default=size)
        mask_id = own.raw(None, "mask_token_id")
    keys = "target_layers", "target_layer_ids"
    stated = own.raw(*keys)
    if stated is None or isinstance(stated, str | bytes) or not hasattr(stated, "__len__") or not len(stated):
        raise own.malformed(*keys, "expected a list of layers")
    layers = tuple(own.checked_integer(*keys, each, 0, MAX_LAYERS) - first for each in stated)
    mask_id = own.checked_integer("mask_token_id", "mask_token_id", mask_id, 0, vocabulary - 1)
    width = own.integer(None, "target_hidden_size", high=MAX_WIDTH, default=hidden)
    linear = builder.linear("model.fc", hidden, len(layers) * width, bias=False)
    return BlockInputs(Fusion(layers, linear, output_norm=builder.norm("model.hidden_norm")), mask_id, size)

"""EAGLE-3: a drafter of one layer that reads three streams of its model, and may draft a part of its ids. numpy only.

Published as folders (SGLang's names, and those of vLLM's `speculators`) and as GGUF files of llama.cpp. What one does
not have is its model's: the embedding, and the head where it drafts all ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.models.dimensions import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Dimensions, read_dimensions
from realizar.models.drafters.drafter_files import IDS, config_of, has_head, refuse_windows, with_model_tensors
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Fusion, PairedInputs
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Attention, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_NAME = "eagle3"
_STREAMS = 3
_READ_ALREADY = frozenset({IDS, "t2d"})
"""Tensors that are read into the spec, or say the same again."""
_LAYER = re.compile(r"model\.layers\.0\.(.+)")
_PLACES = "midlayer.", "layers.0."
"""Where folders have the layer: SGLang's, and those of `speculators`."""
_GGUF_NAMES = {"model.fc": "fc", "model.input_norm": "enc.output_norm", "hidden_norm": "attn_norm_2"}
_OUTER = "transformer_layer_config"
_OF_TRAINING = frozenset({_OUTER, "has_no_defaults_at_init", "embed_requires_grad", "tie_word_embeddings"})
_TARGET_LAYERS = "eagle_aux_hidden_state_layer_ids"
_VARIANTS = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}  # fmt: skip
"""Keys of `eagle_config`, and the values of what is built here."""


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """By the tensors of a folder: some name a class that is not their own."""
    if checkpoint.format == "gguf":
        return checkpoint.metadata.get("general.architecture") == _NAME
    return any(f"{place}hidden_norm.weight" in checkpoint.tensors for place in _PLACES)


def build_eagle3(checkpoint: Checkpoint, model: ModelSpec, of_model: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """Describe a head for a model, and give its checkpoint with the tensors that it takes of the model's.

    Its context is the model's: positions do not end where its own training did.

    Raises:
        UnsupportedModelError: a key value that this program can't honour, or a model whose tensors it can't take.
        CheckpointError: a hyper-parameter or the list of ids is missing, of the wrong type, or absurd.
    """
    whole = with_model_tensors(checkpoint, model, of_model)
    hparams = HyperParameters(whole, _NAME, _hyper_parameters(checkpoint, whole))
    sizes = read_dimensions(hparams, defaults={"max_position_embeddings": model.context_length})
    sizes = replace(sizes, context_length=model.context_length)
    if sizes.num_layers != 1:
        raise hparams.unsupported("block_count", "num_hidden_layers", sizes.num_layers)
    refuse_windows(hparams, sizes.num_layers)
    builder = SpecBuilder(hparams, sizes, gguf_names=_GGUF_NAMES, rename=_renaming(checkpoint))
    ids = _read_ids(hparams, sizes)
    inputs = _inputs(builder, model)
    layer = Layer(
        _attention(builder),
        builder.feed_forward(0),
        pre_feedforward_norm=builder.norm("model.layers.0.post_attention_layernorm"),
    )
    spec = builder.spec(
        [layer], tied_by_default=False, head_size=None if ids is None else len(ids),
        is_ignored=lambda name: name in _READ_ALREADY,
    )  # fmt: skip
    return replace(spec, vocab_size=spec.head.out_features, next_token=inputs, head_ids=ids), whole


def _hyper_parameters(checkpoint: Checkpoint, whole: Checkpoint) -> dict[str, Any]:
    """Those of a folder in one dictionary; its head is the embedding where it has no other."""
    config = config_of(checkpoint)
    inner = config.get(_OUTER)
    both = {**config, **(inner if isinstance(inner, Mapping) else {})}
    kept = {key: value for key, value in both.items() if key not in _OF_TRAINING and not key.startswith("speculators_")}
    return {**kept, "tie_word_embeddings": not has_head(whole)}


def _renaming(checkpoint: Checkpoint) -> Callable[[str], str]:
    found = (each for each in _PLACES if f"{each}hidden_norm.weight" in checkpoint.tensors)
    place = next(found, _PLACES[0])

    def rename(name: str) -> str:
        of_layer = _LAYER.fullmatch(name)
        return name.removeprefix("model.") if of_layer is None else place + of_layer[1]

    return rename


def _inputs(builder: SpecBuilder, model: ModelSpec) -> PairedInputs:
    hparams, base = builder.hparams, "model.layers.0"
    width = hparams.integer("target_hidden_size", "target_hidden_size", high=MAX_WIDTH, default=model.hidden_size)
    has_norm = hparams.boolean("norm_before_fc", "norm_before_fc", default=False)
    fusion = Fusion(
        _read_layers(hparams, model),
        builder.linear("model.fc", builder.sizes.hidden_size, _STREAMS * width, bias=False),
        builder.norm("model.input_norm", _STREAMS * width) if has_norm else None,
    )
    return PairedInputs(
        builder.norm(f"{base}.input_layernorm"),
        builder.norm(f"{base}.hidden_norm"),
        fusion,
        hparams.boolean("norm_before_residual", "norm_before_residual", default=False),
    )


def _attention(builder: SpecBuilder) -> Attention:
    """Q, K and V read twice the width."""
    rope = read_rope(builder.hparams, builder.sizes, pairing="interleaved")
    own = builder.attention(0, rope=rope)
    q, k, v = (
        builder.linear(matrix.weight.removesuffix(".weight"), matrix.out_features, 2 * matrix.in_features, bias=False)
        for matrix in (own.q, own.k, own.v)
    )
    return replace(own, q=q, k=k, v=v)


def _read_layers(hparams: HyperParameters, model: ModelSpec) -> tuple[int, ...]:
    """The layers of the model whose streams are read: files name the layer after each, which reads it.

    Only SGLang's `eagle_config` names the layers themselves. A folder that names none means the three of the paper's
    code.
    """
    nested = hparams.raw(None, "eagle_config")
    inner = None if not isinstance(nested, Mapping) else hparams.nested("eagle_config", nested)
    keys: tuple[str | None, str | None] = ("target_layers", _TARGET_LAYERS)
    stated, first, own = hparams.raw(*keys), 1, None
    if inner is not None:
        own = inner.raw(None, _TARGET_LAYERS)
        for name, known in _VARIANTS.items():
            inner.only(None, name, known)
    if not hparams.is_gguf and not stated:
        if not own:
            count = len(model.layers)
            return 1, count // 2 - 1, count - 4
        stated, first = own, 0
    if stated is None or isinstance(stated, str | bytes) or not hasattr(stated, "__len__") or len(stated) != _STREAMS:
        raise hparams.malformed(*keys, f"expected a list of {_STREAMS}, one per stream")
    return tuple(hparams.checked_integer(*keys, each, 0, MAX_LAYERS) - first for each in stated)


def _read_ids(hparams: HyperParameters, sizes: Dimensions) -> tuple[int, ...] | None:
    """What the rows of the head stand for; None where they stand for all ids.

    Folders keep the distance of each from its row, and GGUF files the ids.
    """
    count = hparams.integer(None, "draft_vocab_size", high=MAX_VOCABULARY, default=sizes.vocab_size)
    stored = hparams.checkpoint.tensors.get(IDS)
    if stored is None:
        if count != sizes.vocab_size:
            raise CheckpointError(hparams.checkpoint.path, f"tensor '{IDS}'", "missing")
        return None

    def wrong(reason: str) -> CheckpointError:
        return CheckpointError(stored.path, f"tensor '{IDS}'", reason)

    if stored.type_name != "I64" or len(stored.shape) != 1:
        raise wrong(f"expected a list of I64, found {stored.type_name} {stored.shape}")
    if not hparams.is_gguf and stored.shape != (count,):
        raise wrong(f"it has {stored.shape[0]} numbers, and 'draft_vocab_size' is {count}")
    ids: NDArray[np.int64] = np.array(stored.data).view("<i8")
    if not hparams.is_gguf:
        ids = ids + np.arange(len(ids))
    if not len(ids) or ids.min() < 0 or ids.max() >= sizes.vocab_size or len(np.unique(ids)) < len(ids):
        raise wrong(f"its ids are not distinct ones of the {sizes.vocab_size}")
    return tuple(ids.tolist())

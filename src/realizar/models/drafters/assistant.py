"""Gemma 4's assistants: drafters of a few layers that read the keys and values of their model. numpy only.

Published as folders in transformers' names, and as GGUF files of llama.cpp. An assistant reads its model's embedding,
and has a head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.architectures.gemma4 import DEFAULTS, assistant_layers
from realizar.models.dimensions import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, read_dimensions
from realizar.models.drafters.drafter_files import config_of, model_tensor
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.next_token import token_and_state
from realizar.models.parts import AssistantInputs
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION
from realizar.models.tensor_source import TensorSource

_NAME = "gemma4-assistant"
_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_TEXT = "text_config"
_GGUF_NAMES = {
    **GGUF_POST_ATTENTION, "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection"
}  # fmt: skip
_OF_CLUSTERS = frozenset(
    {
        "masked_embedding.centroids.weight", "masked_embedding.token_ordering", "masked_embd_centroids.weight",
        "masked_embd_ordering", "masked_embd_ordering.weight",
    }
)  # fmt: skip
"""Tensors by which transformers chooses the ids that it scores. Here all are, as llama.cpp does it."""
_LENT = "model embedding"
"""The model's embedding, by its name in the spec and in the checkpoint of a drafter."""


def is_assistant(checkpoint: Checkpoint) -> bool:
    if checkpoint.format == "gguf":
        return checkpoint.metadata.get("general.architecture") == _NAME
    return config_of(checkpoint).get("model_type") in _MODEL_TYPES


def build_assistant(checkpoint: Checkpoint, model: ModelSpec, of_model: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """Describe an assistant of a model, and give its checkpoint with the model's embedding.

    Its context is the model's: it reads what that one keeps.

    Raises:
        UnsupportedModelError: a key value that this program can't honour, or a model whose embedding or layers it can't
            read.
        CheckpointError: a hyper-parameter is missing, of the wrong type, or absurd.
    """
    hparams = HyperParameters(checkpoint, _NAME, _hyper_parameters(checkpoint))
    hparams.only(None, "use_bidirectional_attention", "vision")  # of its model's images
    for key in ("num_centroids", "centroid_intermediate_top_k"):
        hparams.integer(None, key, high=MAX_VOCABULARY, default=1)
    hparams.boolean(None, "use_ordered_embeddings", default=False)
    hparams.optional_number("final_logit_softcapping", "final_logit_softcapping")  # its logits have none
    sizes = read_dimensions(hparams, defaults=DEFAULTS, varies=True)
    sizes = replace(sizes, context_length=model.context_length)
    drafting = hparams.integer("nextn_predict_layers", None, high=MAX_LAYERS, default=sizes.num_layers)
    if drafting != sizes.num_layers:
        raise hparams.unsupported("nextn_predict_layers", None, drafting)
    builder = SpecBuilder(
        hparams, sizes, activation_key="hidden_activation", default_activation="gelu_tanh", gguf_names=_GGUF_NAMES
    )
    width = hparams.integer("embedding_length_out", "backbone_hidden_size", high=MAX_WIDTH)
    of_token, of_state = token_and_state(builder, "pre_projection", width)
    to_state = builder.linear("post_projection", width, sizes.hidden_size, bias=False)
    layers = assistant_layers(builder, model)
    spec = builder.spec(layers, tied_by_default=True, is_ignored=_OF_CLUSTERS.__contains__)
    stored = replace(model_tensor(checkpoint, model, of_model, model.embedding), name=_LENT)
    whole = replace(checkpoint, tensors={**checkpoint.tensors, _LENT: stored})
    drafter = replace(
        spec,
        embedding=_LENT,
        embedding_scale=model.embedding_scale,
        tensors={**spec.tensors, _LENT: TensorSource(_LENT, stored.shape)},
        next_token=AssistantInputs(of_token, of_state, to_state),
    )
    return drafter, whole


def _hyper_parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Those of a folder in one dictionary, of which the outer ones hold."""
    config = config_of(checkpoint)
    text = config.get(_TEXT)
    outer = {key: value for key, value in config.items() if key != _TEXT}
    return {**(text if isinstance(text, Mapping) else {}), **outer}

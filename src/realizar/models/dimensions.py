"""`Dimensions`: the sizes that every decoder has, read and checked once. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.models.hyper_parameters import REQUIRED, HyperParameters, Required

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_SIZE = 4096
MAX_WIDTH = 1 << 20
MAX_FEED_FORWARD = 1 << 24
MAX_VOCABULARY = 1 << 25
MAX_CONTEXT = 1 << 31
MAX_CONVOLUTION = 64


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a decoder.

    Attributes:
        context_length: tokens a request may hold: the configured ones, or else `trained_context_length`.
        norm_eps: added to the mean square (or the variance) before the root.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    feed_forward_size: int
    context_length: int
    trained_context_length: int
    norm_eps: float


def read_dimensions(
    hparams: HyperParameters,
    *,
    eps_keys: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    defaults: Mapping[str, Any] | None = None,
    some_without_attention: bool = False,
    varies: bool = False,
    some_without_feed_forward: bool = False,
) -> Dimensions:
    """Read and check the sizes.

    Args:
        eps_keys: GGUF and `config.json` key of the norms' epsilon.
        defaults: by `config.json` key, where that architecture's configurations leave keys out.
        some_without_attention: a GGUF file may give some layers 0 KV heads.
        varies: a GGUF file may give each layer KV heads and a feed-forward of its own; these are the first's.
        some_without_feed_forward: models of experts alone leave its width out, which is 0 then.

    Raises:
        CheckpointError: a key is missing, of the wrong type, out of range, or does not fit the others.
        InvalidRequestError: a longer context is configured than the model was made for.
    """
    known = {} if hparams.is_gguf or defaults is None else defaults

    def read(gguf: str, hf: str, high: int, default: int | Required = REQUIRED, **options: Any) -> int:
        return hparams.integer(gguf, hf, high=high, default=known.get(hf, default), **options)

    hidden = read("embedding_length", "hidden_size", MAX_WIDTH)
    heads = read("attention.head_count", "num_attention_heads", MAX_HEADS)
    kv_keys, absent = ("attention.head_count_kv", "num_key_value_heads"), 0 if some_without_attention else None
    kv_heads = read(*kv_keys, MAX_HEADS, heads, absent=absent, varies=varies)
    if heads % kv_heads:
        raise hparams.malformed(*kv_keys, f"{kv_heads} does not divide the {heads} heads")
    layers = read("block_count", "num_hidden_layers", MAX_LAYERS)
    trained = read("context_length", "max_position_embeddings", MAX_CONTEXT)
    default_width = 0 if some_without_feed_forward else REQUIRED
    return Dimensions(
        vocab_size=read("vocab_size", "vocab_size", MAX_VOCABULARY, _count_ids(hparams)),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_read_head_size(hparams, hidden, heads, known),
        feed_forward_size=read(
            "feed_forward_length", "intermediate_size", MAX_FEED_FORWARD, default_width, varies=varies
        ),
        context_length=_choose_context_length(hparams, trained),
        trained_context_length=trained,
        norm_eps=hparams.number(*eps_keys, high=1.0, default=known.get(eps_keys[1], REQUIRED)),
    )


def _read_head_size(hparams: HyperParameters, hidden: int, heads: int, known: Mapping[str, Any]) -> int:
    keys = ("attention.key_length", "head_dim")
    size = hparams.integer(*keys, high=MAX_HEAD_SIZE, default=known.get("head_dim", hidden // heads))
    if hparams.raw(*keys) is None and "head_dim" not in known and hidden % heads:
        raise hparams.malformed(
            "attention.head_count", "num_attention_heads", f"{heads} heads do not divide the hidden size {hidden}"
        )
    if hparams.integer("attention.value_length", None, high=MAX_HEAD_SIZE, default=size) != size:
        raise hparams.unsupported("attention.value_length", None, hparams.raw("attention.value_length", None))
    if size % 2:
        raise hparams.malformed(*keys, f"head size {size} is odd")
    return size


def _count_ids(hparams: HyperParameters) -> int | Required:
    """What a GGUF file without `vocab_size` has: the length of the token list, or the rows of the embedding."""
    tokens = hparams.checkpoint.metadata.get("tokenizer.ggml.tokens") if hparams.is_gguf else None
    if tokens is not None and hasattr(tokens, "__len__") and len(tokens) > 0:
        return len(tokens)
    embedding = hparams.checkpoint.tensors.get("token_embd.weight") if hparams.is_gguf else None
    return embedding.shape[0] if embedding is not None and len(embedding.shape) == 2 else REQUIRED


def _choose_context_length(hparams: HyperParameters, trained: int) -> int:
    requested = hparams.requested_context_length
    if requested is None:
        return trained
    if not 1 <= requested <= trained:
        raise InvalidRequestError(
            f"context_length {requested} is not within 1 to the model's {trained} tokens", param="context_length"
        )
    return requested

"""`Dimensions`: the sizes that every decoder has, read and checked once. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.models.hyper_parameters import REQUIRED, HyperParameters

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
    hidden = hparams.integer(
        "embedding_length", "hidden_size", high=MAX_WIDTH, default=known.get("hidden_size", REQUIRED)
    )
    heads, kv_heads = _read_heads(hparams, known, 0 if some_without_attention else None, varies)
    layers = hparams.integer(
        "block_count", "num_hidden_layers", high=MAX_LAYERS, default=known.get("num_hidden_layers", REQUIRED)
    )
    trained = hparams.integer(
        "context_length",
        "max_position_embeddings",
        high=MAX_CONTEXT,
        default=known.get("max_position_embeddings", REQUIRED),
    )
    return Dimensions(
        vocab_size=_read_vocab_size(hparams, known),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_read_head_size(hparams, hidden, heads, known),
        feed_forward_size=hparams.integer(
            "feed_forward_length",
            "intermediate_size",
            high=MAX_FEED_FORWARD,
            default=0 if some_without_feed_forward else known.get("intermediate_size", REQUIRED),
            varies=varies,
        ),
        context_length=_choose_context_length(hparams, trained),
        trained_context_length=trained,
        norm_eps=hparams.number(*eps_keys, high=1.0, default=known.get(eps_keys[1], REQUIRED)),
    )


def _read_heads(
    hparams: HyperParameters, known: Mapping[str, Any], absent: int | None, varies: bool
) -> tuple[int, int]:
    """Heads of queries and of keys; layers with `absent` do not count."""
    heads = hparams.integer(
        "attention.head_count",
        "num_attention_heads",
        high=MAX_HEADS,
        default=known.get("num_attention_heads", REQUIRED),
    )
    kv_heads = hparams.integer(
        "attention.head_count_kv",
        "num_key_value_heads",
        high=MAX_HEADS,
        default=known.get("num_key_value_heads", heads),
        absent=absent,
        varies=varies,
    )
    if heads % kv_heads:
        raise hparams.malformed(
            "attention.head_count_kv", "num_key_value_heads", f"{kv_heads} does not divide the {heads} heads"
        )
    return heads, kv_heads


def _read_head_size(hparams: HyperParameters, hidden: int, heads: int, known: Mapping[str, Any]) -> int:
    derived = known.get("head_dim", hidden // heads)
    size = hparams.integer("attention.key_length", "head_dim", high=MAX_HEAD_SIZE, default=derived)
    given = hparams.raw("attention.key_length", "head_dim") is not None or "head_dim" in known
    if not given and hidden % heads:
        raise hparams.malformed(
            "attention.head_count", "num_attention_heads", f"{heads} heads do not divide the hidden size {hidden}"
        )
    if hparams.integer("attention.value_length", None, high=MAX_HEAD_SIZE, default=size) != size:
        raise hparams.unsupported("attention.value_length", None, hparams.raw("attention.value_length", None))
    if size % 2:
        raise hparams.malformed("attention.key_length", "head_dim", f"head size {size} is odd")
    return size


def _read_vocab_size(hparams: HyperParameters, known: Mapping[str, Any]) -> int:
    """`vocab_size`; a GGUF file without it has the length of the token list, or the rows of the embedding."""
    fallback: Any = known.get("vocab_size", REQUIRED)
    if hparams.is_gguf:
        tokens = hparams.checkpoint.metadata.get("tokenizer.ggml.tokens")
        embedding = hparams.checkpoint.tensors.get("token_embd.weight")
        if tokens is not None and hasattr(tokens, "__len__") and len(tokens) > 0:
            fallback = len(tokens)
        elif embedding is not None and len(embedding.shape) == 2:
            fallback = embedding.shape[0]
    return hparams.integer("vocab_size", "vocab_size", high=MAX_VOCABULARY, default=fallback)


def _choose_context_length(hparams: HyperParameters, trained: int) -> int:
    requested = hparams.requested_context_length
    if requested is None:
        return trained
    if not 1 <= requested <= trained:
        raise InvalidRequestError(
            f"context_length {requested} is not within 1 to the model's {trained} tokens", param="context_length"
        )
    return requested

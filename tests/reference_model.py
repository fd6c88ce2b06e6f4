"""The specification's twin: a `ModelSpec` run in plain numpy, one sentence per sentence of `models/spec.py`.

No cache, no batching, no fusion: whole sequences, one operation after the other, in float32 or float64. Every backend
is tested against it, and it is tested against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from realizar.models.spec import AnyFeedForward, Attention, FeedForward, Layer, Linear, Mixer, ModelSpec, Norm, Rope

Array = NDArray[Any]


class ReferenceModel:
    """A model in numpy.

    Args:
        spec: what to compute.
        tensors: canonical name to float array, for every tensor that the spec names.
        dtype: float32 or float64, of all arithmetic. Positions times frequencies are rounded to float32 in both cases,
            as models were trained with these angles.
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Array], dtype: DTypeLike = np.float32) -> None:
        self.spec = spec
        self.dtype = np.dtype(dtype)
        self._tensors = {name: np.asarray(tensors[name], self.dtype) for name in spec.tensors}

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[tokens, vocab_size]: what follows each token, given those before it."""
        return self.head(self.hidden(token_ids))

    def hidden(self, token_ids: Sequence[int]) -> Array:
        """[tokens, hidden_size]: after the final norm."""
        spec = self.spec
        x = self._tensors[spec.embedding][np.asarray(token_ids)] * self.dtype.type(spec.embedding_scale)
        for layer in spec.layers:
            x = self._layer(layer, x)
        return self._norm(spec.final_norm, x)

    def head(self, hidden: Array) -> Array:
        """[tokens, vocab_size] from [tokens, hidden_size]."""
        logits = self._linear(self.spec.head, hidden) * self.dtype.type(self.spec.logit_scale)
        cap = self.spec.logit_soft_cap
        return logits if cap is None else np.tanh(logits / self.dtype.type(cap)) * self.dtype.type(cap)

    def _layer(self, layer: Layer, x: Array) -> Array:
        scale = self.dtype.type(layer.residual_scale)
        if layer.mixer is not None:
            mixed = self._mixer(layer.mixer, self._norm(layer.input_norm, x))
            x = x + scale * self._norm(layer.post_mixer_norm, mixed)
        if layer.feed_forward is not None:
            fed = self._any_feed_forward(layer.feed_forward, self._norm(layer.pre_feedforward_norm, x))
            x = x + scale * self._norm(layer.post_feedforward_norm, fed)
        return x

    def _mixer(self, part: Mixer, x: Array) -> Array:
        if isinstance(part, Attention):
            return self._attention(part, x)
        raise NotImplementedError(type(part).__name__)

    def _any_feed_forward(self, part: AnyFeedForward, x: Array) -> Array:
        if isinstance(part, FeedForward):
            return self._feed_forward(part, x)
        raise NotImplementedError(type(part).__name__)

    def _norm(self, norm: Norm | None, x: Array) -> Array:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.dtype.type(norm.eps))
        x = x * (self._tensors[norm.weight] + self.dtype.type(norm.weight_offset))
        return x if norm.bias is None else x + self._tensors[norm.bias]

    def _linear(self, linear: Linear, x: Array) -> Array:
        y = x @ self._tensors[linear.weight].T
        return y if linear.bias is None else y + self._tensors[linear.bias]

    def _attention(self, part: Attention, x: Array) -> Array:
        q, k, v = (self._linear(matrix, x) for matrix in (part.q, part.k, part.v))
        if part.qk_norm_axis == "row":
            q, k = self._norm(part.q_norm, q), self._norm(part.k_norm, k)
        q, k, v = (a.reshape(len(x), -1, part.head_size) for a in (q, k, v))  # [tokens, heads, head_size]
        if part.qk_norm_axis == "head":
            q, k = self._norm(part.q_norm, q), self._norm(part.k_norm, k)
        if part.rope is not None:
            q, k = self._rotate(part.rope, q), self._rotate(part.rope, k)
        group = part.num_heads // part.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.dtype.type(part.scale)
        if part.soft_cap is not None:
            scores = np.tanh(scores / self.dtype.type(part.soft_cap)) * self.dtype.type(part.soft_cap)
        scores = np.where(_visible(len(x), part.window), scores, self.dtype.type(-np.inf))
        if part.sinks is not None:
            sinks = np.broadcast_to(self._tensors[part.sinks][:, None, None], (part.num_heads, len(x), 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[..., : len(x)]
        attended = np.einsum("hqk,khd->qhd", weights, v)
        return self._linear(part.o, attended.reshape(len(x), -1))

    def _rotate(self, rope: Rope, x: Array) -> Array:  # [tokens, heads, head_size]
        positions = np.arange(len(x), dtype=np.float32)
        angles = (positions[:, None] * np.asarray(rope.inverse_frequencies, np.float32)).astype(self.dtype)
        cos = (np.cos(angles) * self.dtype.type(rope.magnitude))[:, None]
        sin = (np.sin(angles) * self.dtype.type(rope.magnitude))[:, None]
        half = rope.size // 2
        first, second = (
            (slice(0, half), slice(half, rope.size))
            if rope.pairing == "neox"
            else (slice(0, rope.size, 2), slice(1, rope.size, 2))
        )
        a, b = x[..., first], x[..., second]
        rotated = x.copy()
        rotated[..., first] = a * cos - b * sin
        rotated[..., second] = b * cos + a * sin
        return rotated

    def _feed_forward(self, part: FeedForward, x: Array) -> Array:
        up = self._linear(part.up, x)
        if part.gate is None:
            return self._linear(part.down, _activate(part.activation, up))
        return self._linear(part.down, _activate(part.activation, self._linear(part.gate, x)) * up)


def _visible(tokens: int, window: int | None) -> NDArray[np.bool_]:
    """[tokens, tokens]: whether the row's token sees the column's."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    return (distance >= 0) & (distance < (tokens if window is None else window))


def _activate(name: str, x: Array) -> Array:
    kind = x.dtype.type
    if name == "silu":
        return x / (kind(1) + np.exp(-x))
    if name == "gelu_tanh":
        return kind(0.5) * x * (kind(1) + np.tanh(kind(math.sqrt(2 / math.pi)) * (x + kind(0.044715) * x * x * x)))
    erf = np.vectorize(math.erf, otypes=[x.dtype])
    return kind(0.5) * x * (kind(1) + erf(x * kind(math.sqrt(0.5))))

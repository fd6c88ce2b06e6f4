"""The specification's twin: a `ModelSpec` run in plain numpy, one sentence per sentence of `models/spec.py`.

No batching, no fusion: one sequence, one operation after the other, in float32 or float64. A sequence may come in
chunks, with a `State` between them. Every backend is tested against it, and it is tested against transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from realizar.models.layer_inputs import InputGate, LayerInputs
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import AssistantInputs, Linear, NextTokenInputs, Norm, PairedInputs, Rope
from realizar.models.spec import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Attention,
    ExpertLinear,
    Experts,
    FeedForward,
    Layer,
    ModelSpec,
)
from realizar.quantization.microscaling import e4m3

Array = NDArray[Any]
State = dict[int, tuple[Array, ...]]
"""The state that layers keep of earlier chunks, by layer index: keys and values, a convolution's last inputs, or
those and the states of a recurrence's heads."""


class ReferenceModel:
    """A model in numpy.

    Args:
        spec: what to compute.
        tensors: canonical name to float array, for every tensor that the spec names.
        dtype: float32 or float64, of all arithmetic. Positions times frequencies are rounded to float32 in both cases,
            as models were trained with these angles.
        add_up: of a rank: gives the sum of what all ranks call it with.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Array], dtype: DTypeLike = np.float32,
        add_up: Callable[[Array], Array] = lambda part: part,
    ) -> None:  # fmt: skip
        self.spec, self._add_up = spec, add_up
        self.dtype = np.dtype(dtype)
        self._tensors = {name: np.asarray(tensors[name], self.dtype) for name in spec.tensors}

    def logits(self, token_ids: Sequence[int], state: State | None = None, given: Array | None = None) -> Array:
        """[tokens, vocab_size]: what follows each token, given those before it; of a rank the logits of its ids.

        Args:
            state: of the chunks before these tokens, empty before the first; the tokens are added to it. An assistant
                takes its model's, of the tokens before its one.
            given: the hidden state before each token, [tokens, state_size], of a drafter that reads them.
        """
        return self.head(self.hidden(token_ids, state, given))

    def hidden(self, token_ids: Sequence[int], state: State | None = None, given: Array | None = None) -> Array:
        """[tokens, hidden_size]: after the final norm; arguments as of `logits`."""
        return self._norm(self.spec.final_norm, self.streams(token_ids, state, given)[-1])

    def streams(self, token_ids: Sequence[int], state: State | None = None, given: Array | None = None) -> list[Array]:
        """The residual stream after each layer, [tokens, hidden_size]; arguments as of `logits`."""
        spec, state, streams = self.spec, {} if state is None else state, []
        x = self._add_up(self._embedded(np.asarray(token_ids))) * self.dtype.type(spec.embedding_scale)
        pair = None
        if given is not None:
            given = np.asarray(given, self.dtype)
        if isinstance(spec.next_token, NextTokenInputs) and given is not None:
            x = self._next_token_inputs(spec.next_token, x, given)
        elif isinstance(spec.next_token, PairedInputs) and given is not None:
            normed = self._norm(spec.next_token.state_norm, given)
            pair = np.concatenate([self._norm(spec.next_token.token_norm, x), normed], axis=1)
            x = normed if spec.next_token.normed_stream else given
        elif isinstance(spec.next_token, AssistantInputs) and given is not None:
            x = self._linear(spec.next_token.of_token, x) + self._linear(spec.next_token.of_state, given)
        inputs = None if spec.layer_inputs is None else self._layer_inputs(spec.layer_inputs, token_ids, x)
        for index, layer in enumerate(spec.layers):
            x = self._layer(layer, x, index, state, pair if index == 0 else None)
            if layer.input_gate is not None and inputs is not None:
                x = x + self._gated(layer.input_gate, x, inputs[:, index])
            if layer.output_scale is not None:
                x = x * self._tensors[layer.output_scale]
            streams.append(x)
        return streams

    def _embedded(self, token_ids: Array) -> Array:
        """[tokens, hidden_size], zeros where another rank has the id."""
        table, first = self._tensors[self.spec.embedding], self.spec.first_id
        if self.spec.share.ranks == 1:
            return table[token_ids]
        own = (token_ids >= first) & (token_ids < first + len(table))
        embedded: Array = np.where(own[:, None], table[np.where(own, token_ids - first, 0)], 0)
        return embedded

    def head(self, hidden: Array) -> Array:
        """[tokens, vocab_size] from [tokens, hidden_size]."""
        logits = self._linear(self.spec.head, hidden) * self.dtype.type(self.spec.logit_scale)
        cap = self.spec.logit_soft_cap
        return logits if cap is None else np.tanh(logits / self.dtype.type(cap)) * self.dtype.type(cap)

    def _next_token_inputs(self, part: NextTokenInputs, x: Array, given: Array) -> Array:
        of_token = self._linear(part.of_token, self._norm(part.token_norm, x))
        return of_token + self._linear(part.of_state, self._norm(part.state_norm, given))

    def _layer_inputs(self, part: LayerInputs, token_ids: Sequence[int], x: Array) -> Array:
        """[tokens, layers, size] of the tokens and their embeddings `x`."""
        shape = len(x), -1, part.size
        projected = self._norm(part.norm, self._linear(part.projection, x).reshape(shape))
        rows = self._tensors[part.table][np.asarray(token_ids)].reshape(shape)
        inputs: Array = self.dtype.type(part.scale) * (projected + self.dtype.type(part.table_scale) * rows)
        return inputs

    def _gated(self, part: InputGate, x: Array, own: Array) -> Array:
        gated = _activate(part.activation, self._linear(part.gate, x)) * own
        return self._norm(part.norm, self._linear(part.projection, gated))

    def handed_on(self, hidden: Array) -> Array:
        """What an assistant reads beside the draft that it made from [tokens, hidden_size]: [tokens, state_size]."""
        assert isinstance(self.spec.next_token, AssistantInputs)
        return self._linear(self.spec.next_token.to_state, hidden)

    def fused(self, streams: Sequence[Array]) -> Array:
        """What a drafter makes of its model's streams after each layer, each [tokens, hidden_size], given all."""
        fusion = self.spec.fusion
        assert fusion is not None
        together = np.concatenate([streams[layer] for layer in fusion.layers], axis=1)
        return self._norm(fusion.output_norm, self._linear(fusion.linear, self._norm(fusion.norm, together)))

    def block(self, token_ids: Sequence[int], states: Array) -> Array:
        """[tokens, vocab_size] of a block, behind tokens whose `fused` states are [tokens before, hidden_size]."""
        x = self._embedded(np.asarray(token_ids)) * self.dtype.type(self.spec.embedding_scale)
        for layer in self.spec.layers:
            part, normed = layer.mixer, self._norm(layer.input_norm, x)
            assert isinstance(part, Attention)
            q, k, v = (
                self._linear(part.q, normed),
                *(self._linear(matrix, np.concatenate([states, normed])) for matrix in (part.k, part.v)),
            )
            q, k, v = (a.reshape(len(a), -1, part.head_size) for a in (q, k, v))
            q, k = self._norm(part.q_norm, q), self._norm(part.k_norm, k)
            if part.rope is not None:
                q, k = self._rotate(part.rope, q, len(states)), self._rotate(part.rope, k, 0)
            k, v = (np.repeat(a, part.num_heads // part.num_kv_heads, axis=1) for a in (k, v))
            weights = _softmax(np.einsum("qhd,khd->hqk", q, k) * self.dtype.type(part.scale))
            x = x + self._linear(part.o, np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
            if layer.feed_forward is not None:
                x = x + self._feed_forward(layer.feed_forward, self._norm(layer.pre_feedforward_norm, x))
        return self.head(self._norm(self.spec.final_norm, x))

    def _layer(self, layer: Layer, x: Array, index: int, state: State, pair: Array | None) -> Array:
        scale = self.dtype.type(layer.residual_scale)
        if layer.mixer is not None:
            normed = self._norm(layer.input_norm, x) if pair is None else pair
            if isinstance(layer.mixer, SharedAttention):
                mixed = self._shared_attention(layer.mixer, normed, state[layer.mixer.source])
            else:
                mixed, state[index] = self.mixer(layer.mixer, normed, state.get(index))
            x = x + scale * self._norm(layer.post_mixer_norm, self._add_up(mixed))
        if layer.feed_forward is not None:
            fed = self._feed_forward(layer.feed_forward, self._norm(layer.pre_feedforward_norm, x))
            has_own = isinstance(layer.feed_forward, Experts) and layer.feed_forward.norms is not None
            fed = fed if has_own else self._add_up(fed)
            x = x + scale * self._norm(layer.post_feedforward_norm, fed)
        return x

    def _shared_attention(self, part: SharedAttention, x: Array, kept: tuple[Array, ...]) -> Array:
        """Attention over the keys and values of another layer, those of this chunk among them.

        An assistant's token, which has none, is behind those of its model, and sees what the last of them saw.
        """
        q = self._norm(part.q_norm, self._linear(part.q, x).reshape(len(x), -1, part.head_size))
        first = len(kept[0]) - len(x)
        if part.rope is not None:
            q = self._rotate(part.rope, q, first + isinstance(self.spec.next_token, AssistantInputs))
        return self._linear(part.o, self._attend(part, q, kept[0], kept[1], first).reshape(len(x), -1))

    def mixer(
        self, part: Attention | ShortConvolution | GatedDeltaNet, x: Array, kept: tuple[Array, ...] | None
    ) -> tuple[Array, tuple[Array, ...]]:
        """The mixer's output for a chunk, and what is kept for the next one."""
        if isinstance(part, GatedDeltaNet):
            return self._gated_delta_net(part, x, kept)
        if isinstance(part, ShortConvolution):
            return self._short_convolution(part, x, kept)
        return self._attention(part, x, kept)

    def _norm(self, norm: Norm | None, x: Array, mean: Callable[[Array], Array] | None = None) -> Array:
        if norm is None:
            return x
        mean = mean or (lambda values: values.mean(axis=-1, keepdims=True))
        if norm.kind == "layer":
            x = x - mean(x)
        x = x / np.sqrt(mean(x * x) + self.dtype.type(norm.eps))
        weight = (self._tensors[norm.weight] + self.dtype.type(norm.weight_offset)) * self.dtype.type(norm.weight_scale)
        x = x * weight
        return x if norm.bias is None else x + self._tensors[norm.bias]

    def _mean_of_all(self, values: Array) -> Array:
        """[tokens, 1]: the mean of all ranks' features, of which each has as many."""
        return self._add_up(values.mean(axis=-1, keepdims=True)) / self.dtype.type(self.spec.share.ranks)

    def _linear(self, linear: Linear, x: Array) -> Array:
        y = x @ self._tensors[linear.weight].T
        return y if linear.bias is None else y + self._tensors[linear.bias]

    def _attention(self, part: Attention, x: Array, kept: tuple[Array, ...] | None) -> tuple[Array, tuple[Array, ...]]:
        q, k, v = (self._linear(matrix, x) for matrix in (part.q, part.k, part.v))
        if part.qk_norm_axis == "token":
            q, k = self._norm(part.q_norm, q, self._mean_of_all), self._norm(part.k_norm, k, self._mean_of_all)
        q, k, v = (a.reshape(len(x), -1, part.head_size) for a in (q, k, v))  # [tokens, heads, head_size]
        if part.qk_norm_axis == "head":
            q, k = self._norm(part.q_norm, q), self._norm(part.k_norm, k)
        if part.v_norm_eps is not None:
            v = v / np.sqrt((v * v).mean(axis=-1, keepdims=True) + self.dtype.type(part.v_norm_eps))
        first = 0 if kept is None else len(kept[0])  # position of the chunk's first token
        if part.rope is not None:
            q, k = self._rotate(part.rope, q, first), self._rotate(part.rope, k, first)
        if part.query_growth is not None:
            steps = np.arange(first, first + len(x)) // part.query_growth.period
            q = q * (1 + part.query_growth.factor * np.log(1 + steps))[:, None, None].astype(self.dtype)
        if kept is not None:
            k, v = np.concatenate([kept[0], k]), np.concatenate([kept[1], v])
        attended = self._attend(part, q, k, v, first).reshape(len(x), -1)
        if part.gate is not None:
            attended = attended * _sigmoid(self._linear(part.gate, x))
        return self._linear(part.o, attended), (k, v)

    def _attend(self, part: Attention | SharedAttention, q: Array, k: Array, v: Array, first: int) -> Array:
        """[tokens, heads, head_size] from queries of the chunk, and keys and values of all tokens so far."""
        group = part.num_heads // part.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.dtype.type(part.scale)
        if part.soft_cap is not None:
            scores = np.tanh(scores / self.dtype.type(part.soft_cap)) * self.dtype.type(part.soft_cap)
        scores = np.where(_visible(first, len(q), part.window), scores, self.dtype.type(-np.inf))
        if isinstance(part, Attention) and part.sinks is not None:
            sinks = np.broadcast_to(self._tensors[part.sinks][:, None, None], (part.num_heads, len(q), 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        return np.einsum("hqk,khd->qhd", _softmax(scores)[..., : len(k)], v)

    def _rotate(self, rope: Rope, x: Array, first: int) -> Array:  # [tokens, heads, head_size]
        positions = np.arange(first, first + len(x), dtype=np.float32)
        angles = (positions[:, None] * np.asarray(rope.inverse_frequencies, np.float32)).astype(self.dtype)
        cos = (np.cos(angles) * self.dtype.type(rope.magnitude))[:, None]
        sin = (np.sin(angles) * self.dtype.type(rope.magnitude))[:, None]
        half = rope.size // 2
        a_dims, b_dims = (
            (slice(0, half), slice(half, rope.size))
            if rope.pairing == "neox"
            else (slice(0, rope.size, 2), slice(1, rope.size, 2))
        )
        a, b = x[..., a_dims], x[..., b_dims]
        rotated = x.copy()
        rotated[..., a_dims] = a * cos - b * sin
        rotated[..., b_dims] = b * cos + a * sin
        return rotated

    def _short_convolution(
        self, part: ShortConvolution, x: Array, kept: tuple[Array, ...] | None
    ) -> tuple[Array, tuple[Array, ...]]:
        b, c, values = np.split(self._linear(part.in_proj, x), 3, axis=-1)  # [tokens, channels]
        before = np.zeros((part.length - 1, part.channels), self.dtype) if kept is None else kept[0]
        gated = np.concatenate([before, b * values])
        kernel = self._tensors[part.kernel]
        mixed = sum(gated[j : j + len(x)] * kernel[:, j] for j in range(part.length))
        if part.bias is not None:
            mixed = mixed + self._tensors[part.bias]
        return self._linear(part.out_proj, c * mixed), (gated[len(x) :],)

    def _gated_delta_net(
        self, part: GatedDeltaNet, x: Array, kept: tuple[Array, ...] | None
    ) -> tuple[Array, tuple[Array, ...]]:
        heads, ratio = part.num_value_heads, part.num_value_heads // part.num_key_heads
        if kept is None:
            before = np.zeros((part.length - 1, part.channels), self.dtype)
            kept = before, np.zeros((heads, part.key_size, part.value_size), self.dtype)
        inputs = np.concatenate([self._linear(matrix, x) for matrix in (part.q, part.k, part.v)], axis=-1)
        inputs, state = np.concatenate([kept[0], inputs]), kept[1]
        kernel = self._tensors[part.kernel]
        mixed = _activate("silu", sum(inputs[j : j + len(x)] * kernel[:, j] for j in range(part.length)))
        size = part.num_key_heads * part.key_size
        q, k = (mixed[:, at : at + size].reshape(len(x), part.num_key_heads, -1) for at in (0, size))
        q, k = (a / np.sqrt((a * a).sum(axis=-1, keepdims=True) + self.dtype.type(1e-6)) for a in (q, k))
        q = q / self.dtype.type(math.sqrt(part.key_size))
        q, k = (np.tile(a, (1, ratio, 1)) if part.tiled else np.repeat(a, ratio, axis=1) for a in (q, k))
        v = mixed[:, 2 * size :].reshape(len(x), heads, -1)
        beta, decay = _sigmoid(self._linear(part.beta, x)), self._decay(part, x)
        output = np.empty_like(v)
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            lacking = beta[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + np.einsum("hk,hv->hkv", k[t], lacking)
            output[t] = np.einsum("hk,hkv->hv", q[t], state)
        gated = self._norm(part.norm, output).reshape(len(x), -1) * _activate("silu", self._linear(part.z, x))
        return self._linear(part.out, gated), (inputs[len(x) :], state)

    def _decay(self, part: GatedDeltaNet, x: Array) -> Array:
        """[tokens, value heads]: what a token leaves of each head's state."""
        rate = self._tensors[part.rate]
        rate = -np.exp(rate) if part.rate_is_log else rate
        shifted = self._linear(part.decay, x) + self._tensors[part.decay_bias]
        decay: Array = np.exp(rate * np.logaddexp(self.dtype.type(0), shifted))
        return decay

    def _feed_forward(self, part: FeedForward | Experts, x: Array) -> Array:
        if isinstance(part, Experts):
            return self._experts(part, x)
        up = self._linear(part.up, x)
        if part.gate is None:
            return self._linear(part.down, _activate(part.activation, up))
        return self._linear(part.down, _gated(part.activation, self._linear(part.gate, x), up))

    def _experts(self, part: Experts, x: Array) -> Array:
        norms = part.norms
        logits = self._linear(part.router, x if norms is None else self._norm(norms.router, x))
        scores = _softmax(logits) if part.scoring == "softmax" else _sigmoid(logits)
        chosen = self._choose(part, scores)
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if part.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        weights = weights * self.dtype.type(part.scale)
        if part.expert_scales is not None:
            weights = weights * self._tensors[part.expert_scales][chosen]
        output, read = np.zeros_like(x), x if norms is None else self._norm(norms.experts, x)
        for expert in range(part.num_experts):
            tokens, slots = np.nonzero(chosen == expert)
            fed = self._expert_linear(part.up, expert, read[tokens])
            if part.gate is None:
                fed = _activate(part.activation, fed)
            else:
                gate = self._expert_linear(part.gate, expert, read[tokens])
                fed = _gated("clamped" if part.clamped else part.activation, gate, fed)
            down = self._expert_linear(part.down, expert, fed)
            output[tokens] += weights[tokens, slots, None] * down
        if part.shared is not None and norms is not None:
            shared = self._feed_forward(part.shared, self._norm(norms.shared, x))
            output, shared = self._add_up(output), self._add_up(shared)
            return self._norm(norms.experts_output, output) + self._norm(norms.shared_output, shared)
        if part.shared is not None:
            shared = self._feed_forward(part.shared, x)
            output += shared if part.shared_gate is None else _sigmoid(self._linear(part.shared_gate, x)) * shared
        return output

    def _choose(self, part: Experts, scores: Array) -> NDArray[np.int64]:
        """[tokens, experts per token]: of equal ranks the lower index."""
        ranks = scores if part.selection_bias is None else scores + self._tensors[part.selection_bias]
        if part.num_groups > 1:
            grouped = ranks.reshape(len(ranks), part.num_groups, -1)
            sums = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
            order = np.argsort(-sums, axis=-1, kind="stable")[:, part.groups_per_token :]
            left = np.ones(sums.shape, bool)
            np.put_along_axis(left, order, values=False, axis=-1)
            ranks = np.where(left[..., None], grouped, self.dtype.type(-np.inf)).reshape(ranks.shape)
        return np.argsort(-ranks, axis=-1, kind="stable")[:, : part.experts_per_token]

    def _expert_linear(self, stack: ExpertLinear, expert: int, x: Array) -> Array:
        y = x @ self._tensors[stack.weight][expert].T
        return y if stack.bias is None else y + self._tensors[stack.bias][expert]


def _visible(first: int, tokens: int, window: int | None) -> NDArray[np.bool_]:
    """[tokens, first + tokens]: whether the row's token sees the column's; the first row is at position `first`."""
    distance = np.arange(first, first + tokens)[:, None] - np.arange(first + tokens)[None, :]
    return (distance >= 0) & (distance < (first + tokens if window is None else window))


def _softmax(scores: Array) -> Array:
    """The softmax over the last dimension."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total: Array = weights.sum(axis=-1, keepdims=True)
    return weights / total


def _sigmoid(x: Array) -> Array:
    result: Array = x.dtype.type(1) / (x.dtype.type(1) + np.exp(-x))
    return result


def _gated(name: str, gate: Array, up: Array) -> Array:
    if name == "clamped":
        kind = gate.dtype.type
        gate = np.minimum(gate, kind(SWIGLU_LIMIT))
        up = np.clip(up, kind(-SWIGLU_LIMIT), kind(SWIGLU_LIMIT))
        return gate * _sigmoid(kind(SWIGLU_ALPHA) * gate) * (up + kind(1))
    return _activate(name, gate) * up


def _activate(name: str, x: Array) -> Array:
    kind = x.dtype.type
    if name == "silu":
        return x / (kind(1) + np.exp(-x))
    if name == "relu_squared":
        return np.maximum(x, kind(0)) ** 2
    if name == "gelu_tanh":
        return kind(0.5) * x * (kind(1) + np.tanh(kind(math.sqrt(2 / math.pi)) * (x + kind(0.044715) * x * x * x)))
    erf = np.vectorize(math.erf, otypes=[x.dtype])
    return kind(0.5) * x * (kind(1) + erf(x * kind(math.sqrt(0.5))))


def nearest_e4m3(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """The bytes of the nearest numbers, of two the even one; beyond the largest that one, and NaN of NaN."""
    numbers = e4m3()[:127].astype(np.float64)  # in ascending order
    size = np.minimum(np.abs(values.astype(np.float64)), numbers[-1])
    above = np.clip(np.searchsorted(numbers, size), 1, 126)
    low, high = size - numbers[above - 1], numbers[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (np.where(np.isnan(values), 0x7F, code) | (np.signbit(values) << 7)).astype(np.uint8)


class FP8CacheModel(ReferenceModel):
    """With keys and values in e4m3, as a cache in FP8 keeps them.

    `scales` are those of keys and values by layer, of which others have 1.
    """

    scales: Mapping[int, tuple[float, float]] = {}

    def _attend(self, part: Attention | SharedAttention, q: Array, k: Array, v: Array, first: int) -> Array:
        layer = next(index for index, each in enumerate(self.spec.layers) if each.mixer is part)
        scales = self.scales.get(part.source if isinstance(part, SharedAttention) else layer, (1.0, 1.0))
        k, v = (
            (e4m3()[nearest_e4m3((each / scale).astype(np.float32))] * scale).astype(self.dtype)
            for each, scale in zip((k, v), scales, strict=True)
        )
        return super()._attend(part, q, k, v, first)

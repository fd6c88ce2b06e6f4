"""Models that draft for a random one: itself, its first layers, one that knows nothing of it, heads on its states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from random_models import Recipe, random_model
from realizar.backends.base import ModelSource
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.mixers import SharedAttention
from realizar.models.parts import (
    AssistantInputs,
    BlockInputs,
    Fusion,
    Linear,
    NextTokenInputs,
    Norm,
    PairedInputs,
    Rope,
)
from realizar.models.spec import Attention, FeedForward, Layer, ModelSpec
from realizar.models.tensor_source import TensorSource
from realizar.quantization.random_blocks import random_blocks
from reference_tensors import load_tensor


def itself(recipe: Recipe) -> ModelSource:
    """The model as its own drafter, whose drafts are all right."""
    return ModelSource(*random_model(recipe))


def first_layers(recipe: Recipe, count: int) -> ModelSource:
    """The model's first layers, then its final norm and head: some drafts are right."""
    spec, checkpoint = random_model(recipe)
    cut: ModelSpec = replace(spec, layers=spec.layers[:count])
    names = {name for source in cut.tensors.values() for name in source.names}
    tensors = {name: stored for name, stored in checkpoint.tensors.items() if name in names}
    return ModelSource(cut, replace(checkpoint, tensors=tensors))


def another(recipe: Recipe) -> ModelSource:
    """A model of other weights, and half the layers."""
    return ModelSource(*random_model(replace(recipe, seed=recipe.seed + 1, windows=recipe.windows[:1])))


def roughly(recipe: Recipe, noise: float) -> ModelSource:
    """The model with noise on its F32 matrices, as a share of each weight's size: many drafts are right."""
    spec, checkpoint = random_model(recipe)
    rng, tensors = np.random.default_rng(recipe.seed + 7), dict(checkpoint.tensors)
    for linear in spec.linears():
        (stored,) = spec.tensors[linear.weight].names
        values = np.array(tensors[stored].data).view(np.float32)
        values *= 1 + noise * rng.standard_normal(values.shape).astype(np.float32)
        tensors[stored] = replace(tensors[stored], data=values.view(np.uint8))
    return ModelSource(spec, replace(checkpoint, tensors=tensors))


def spoiled(recipe: Recipe) -> ModelSource:
    """The model with a weight that is not finite, which is found while weights are read."""
    spec, checkpoint = random_model(recipe)
    name = spec.linears()[0].weight
    (stored,) = spec.tensors[name].names
    tensor = checkpoint.tensors[stored]
    tensors = {**checkpoint.tensors, stored: replace(tensor, data=np.full_like(tensor.data, 255))}
    return ModelSource(spec, replace(checkpoint, tensors=tensors))


def next_token_block(recipe: Recipe, of_state: float | None = 0.0) -> ModelSource:
    """A block that foresees a model of one layer as far as it leaves out `of_state`, the share of states before.

    Its layer is the model's last, and it makes nearly the model's stream of an embedding. With an `of_state` of None
    its first matrix is random, of the type of the model's.
    """
    spec, checkpoint = random_model(recipe)
    hidden, rng = recipe.hidden_size, np.random.default_rng(recipe.seed)
    scale = spec.embedding_scale / math.sqrt(hidden)  # that of the model's stream
    token = scale * np.eye(hidden, dtype=np.float32)
    state = ((of_state or 0.0) / math.sqrt(hidden)) * rng.standard_normal((hidden, hidden)).astype(np.float32)
    added = {
        "block.eh_proj": np.concatenate([token, state], axis=1),
        "block.enorm": np.ones(hidden, np.float32), "block.hnorm": np.linspace(0.5, 1.5, hidden, dtype=np.float32),
    }  # fmt: skip
    stored = {
        name: StoredTensor(
            name, GGMLType.F32, values.shape, values.view(np.uint8).reshape(*values.shape[:-1], -1), checkpoint.path, 0
        )
        for name, values in added.items()
    }
    if of_state is None:
        kind = GGMLType[recipe.weights]
        blocks = random_blocks(kind, hidden, 2 * hidden, rng, 1 / math.sqrt(hidden))
        stored["block.eh_proj"] = replace(stored["block.eh_proj"], ggml_type=kind, data=blocks)
    whole, halves = TensorSource("block.eh_proj", (hidden, 2 * hidden)), ((0, hidden), (hidden, 2 * hidden))
    parts = {f"block.{first}": whole.cut(columns=[(first, stop)]) for first, stop in halves}
    norms = {name: TensorSource(name, (hidden,)) for name in ("block.enorm", "block.hnorm")}
    inputs = NextTokenInputs(
        *(Norm("rms", 1e-5, name) for name in norms), *(Linear(name, hidden, hidden) for name in parts)
    )
    cut: ModelSpec = replace(
        spec, layers=spec.layers[-1:], next_token=inputs, tensors={**spec.tensors, **norms, **parts}
    )
    own = {
        cut.embedding,
        *cut.vectors(),
        *(name for each in cut.matrices() for name in (each.weight, each.bias) if name),
    }
    cut = replace(cut, tensors={name: source for name, source in cut.tensors.items() if name in own})
    names = {name for source in cut.tensors.values() for name in source.names}
    tensors = {name: each for name, each in {**checkpoint.tensors, **stored}.items() if name in names}
    return ModelSource(cut, replace(checkpoint, tensors=tensors))


STREAM_LAYERS = (0, 2, 1)
EAGLE3_IDS = 48  # one id in so many is not among those that a head drafts


def eagle3_head(recipe: Recipe, of_state: float | None, *, normed: bool = True) -> ModelSource:
    """A head that foresees a model as far as this is its last feed-forward of the embedding, and `of_state` is small.

    Its attention looks at the token itself, whose embedding it gives back; `of_state` is the share of states. With None
    all is random, of the type of the model's weights. `normed` has the norm before `fc`, and the stream's.
    """
    spec, checkpoint = random_model(recipe)
    make = _HeadMaker(recipe, spec, checkpoint, of_state)
    ids = tuple(each for each in make.rng.permutation(recipe.vocab_size).tolist() if each % EAGLE3_IDS)
    feed_forward, streams = make.feed_forward(), len(STREAM_LAYERS) * recipe.hidden_size
    fusion = Fusion(
        STREAM_LAYERS, make.linear("fc", make.noise(recipe.hidden_size, streams)),
        make.norm("fc_norm", streams) if normed else None,
    )  # fmt: skip
    state_norm = make.norm("state_norm", recipe.hidden_size, of_state or 0.0)
    inputs = PairedInputs(make.norm("token_norm", recipe.hidden_size), state_norm, fusion, normed)
    own_norm = spec.layers[-1].pre_feedforward_norm
    assert own_norm is not None
    before, final = (make.as_in(name, norm) for name, norm in (("mlp_norm", own_norm), ("final_norm", spec.final_norm)))
    layer = Layer(make.attention(), feed_forward, pre_feedforward_norm=before)
    head, embedding = make.values_of(spec.head.weight)[list(ids)], make.values_of(spec.embedding)
    own: ModelSpec = replace(
        spec, layers=(layer,), final_norm=final, head=make.linear("head", head), vocab_size=len(ids), head_ids=ids,
        embedding=make.tensor("embedding", embedding), next_token=inputs,
    )  # fmt: skip
    sources = {name: TensorSource(name, stored.shape) for name, stored in make.stored.items()}
    return ModelSource(replace(own, tensors=sources), replace(checkpoint, tensors=make.stored))


def dflash_head(recipe: Recipe, *, echoes: bool = False) -> ModelSource:
    """A drafter of blocks of random layers, of the type of the model's weights.

    One that `echoes` drafts its row's last token again and again, where that is one of the three quarters of the ids
    that it drafts: its one attention sees no other, as masks and states leave nothing.
    """
    spec, checkpoint = random_model(replace(recipe, seed=recipe.seed + 5, windows=(None, None), parts=("qk_norm",)))
    make = _HeadMaker(recipe, *random_model(recipe), None if not echoes else 0.0)
    hidden, streams = recipe.hidden_size, len(STREAM_LAYERS) * recipe.hidden_size
    fc = make.linear("fc", make.noise(hidden, streams) if not echoes else np.zeros((hidden, streams)))
    inputs = BlockInputs(
        Fusion(STREAM_LAYERS, fc, output_norm=make.norm("hidden_norm", hidden)), recipe.vocab_size - 1, 8
    )
    if echoes:
        table = make.values_of(make.model.embedding)
        ids = tuple(sorted(make.rng.permutation(recipe.vocab_size - 1)[: 3 * recipe.vocab_size // 4].tolist()))
        head = make.linear("head", table[list(ids)])
        table[-1] = 0.0
        one, zero = np.eye(hidden), np.zeros((hidden, hidden))
        q, k, v, o = (make.linear(*each) for each in (("q", zero), ("k", zero), ("v", 1000 * one), ("o", one)))
        size, heads = recipe.head_size, hidden // recipe.head_size
        mixer = Attention(heads, heads, size, 1.0, q, k, v, o)
        layer = Layer(mixer, None, make.norm("input_norm", hidden))
        spec = replace(
            make.model, layers=(layer,), final_norm=make.norm("final_norm", hidden), head=head, vocab_size=len(ids),
            head_ids=ids, embedding=make.tensor("embedding", table), tensors={},
        )  # fmt: skip
        checkpoint = replace(checkpoint, tensors={})
    sources = {name: TensorSource(name, stored.shape) for name, stored in make.stored.items()}
    whole = replace(spec, next_token=inputs, tensors={**spec.tensors, **sources})
    return ModelSource(whole, replace(checkpoint, tensors={**checkpoint.tensors, **make.stored}))


def assistant_head(recipe: Recipe, of_state: float | None) -> ModelSource:
    """An assistant of two layers, which read the keys and values of the model's first and last layers.

    It foresees a model as far as this is its last feed-forward of the embedding, and `of_state` is small. With None all
    is random, of the type of the model's weights, and narrower or wider than the model.
    """
    spec, checkpoint = random_model(recipe)
    make = _HeadMaker(recipe, spec, checkpoint, of_state)
    width = recipe.hidden_size if of_state is not None else recipe.hidden_size * 3 // 2
    share, state = 1.0 if of_state is None else 0.05, 1.0 if of_state is None else of_state
    of_token = np.eye(width) if of_state is not None else make.noise(width, recipe.hidden_size)
    inputs = AssistantInputs(
        make.linear("of_token", of_token),
        make.linear("of_state", state * make.noise(width, recipe.hidden_size)),
        make.linear("to_state", make.noise(recipe.hidden_size, width)),
    )
    own_norm = spec.layers[-1].pre_feedforward_norm
    assert own_norm is not None
    is_random = of_state is None
    norms = [
        make.norm(name, width) if is_random else make.as_in(name, norm)
        for name, norm in (("mlp_norm", own_norm), ("final_norm", spec.final_norm))
    ]
    feed_forward = make.random_feed_forward(width) if is_random else make.feed_forward()
    first, last = (
        make.shared_attention(f"layers.{index}", source, width, share)
        for index, source in enumerate((0, len(spec.layers) - 1))
    )
    layers = (
        Layer(first, None, make.norm("layers.0.norm", width)),
        Layer(last, feed_forward, make.norm("layers.1.norm", width), pre_feedforward_norm=norms[0]),
    )
    head = make.noise(recipe.vocab_size, width) if is_random else make.values_of(spec.head.weight)
    own: ModelSpec = replace(
        spec, hidden_size=width, layers=layers, final_norm=norms[1], head=make.linear("head", head), next_token=inputs,
        embedding=make.tensor("embedding", make.values_of(spec.embedding)),
    )  # fmt: skip
    sources = {name: TensorSource(name, stored.shape) for name, stored in make.stored.items()}
    return ModelSource(replace(own, tensors=sources), replace(checkpoint, tensors=make.stored))


class _HeadMaker:
    """Parts of a head on a model's states; arguments as of `eagle3_head`."""

    def __init__(self, recipe: Recipe, spec: ModelSpec, checkpoint: Checkpoint, of_state: float | None) -> None:
        self._recipe, self.model, self._checkpoint, self._is_random = recipe, spec, checkpoint, of_state is None
        self.rng, self.stored = np.random.default_rng(recipe.seed + 3), dict[str, StoredTensor]()

    def values_of(self, name: str) -> NDArray[np.float32]:
        return load_tensor(self.model.tensors[name], self._checkpoint)

    def noise(self, rows: int, columns: int) -> NDArray[np.float32]:
        return (self.rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def tensor(self, name: str, values: NDArray[np.float32]) -> str:
        kind, blocks = GGMLType.F32, values.view(np.uint8).reshape(*values.shape[:-1], -1)
        if self._is_random and values.ndim == 2 and name != "embedding":
            kind = GGMLType[self._recipe.weights]
            blocks = random_blocks(kind, *values.shape, self.rng, 1 / math.sqrt(values.shape[1]))
        self.stored[name] = StoredTensor(name, kind, values.shape, blocks, self._checkpoint.path, 0)
        return name

    def linear(self, name: str, values: NDArray[np.float32]) -> Linear:
        return Linear(self.tensor(name, values.astype(np.float32)), *values.shape)

    def norm(self, name: str, size: int, centre: float = 1.0) -> Norm:
        weights = 1 + 0.2 * self.rng.standard_normal(size) if self._is_random else np.full(size, centre)
        return Norm("rms", 1e-5, self.tensor(name, weights.astype(np.float32)))

    def as_in(self, name: str, norm: Norm) -> Norm:
        """A norm of the model's weights."""
        return Norm("rms", 1e-5, self.tensor(name, self.values_of(norm.weight)))

    def attention(self) -> Attention:
        hidden, size, one = self._recipe.hidden_size, self._recipe.head_size, np.eye(self._recipe.hidden_size)
        scale = self.model.embedding_scale * float(np.sqrt(np.mean(self.values_of(self.model.embedding) ** 2)))
        heads = hidden // size
        kv_heads = self._recipe.num_kv_heads if self._is_random else heads
        halves = {"q": 4 * one, "k": one[: kv_heads * size], "v": scale * one[: kv_heads * size]}
        q, k, v = (
            self.linear(name, np.concatenate([own, self.noise(*own.shape)], axis=1)) for name, own in halves.items()
        )
        frequencies = tuple(float(np.float32(1000.0 ** (-i / size * 2))) for i in range(size // 2))
        rope, o = Rope("neox", frequencies), self.linear("o", one)
        return Attention(heads, kv_heads, size, 1 / math.sqrt(size), q, k, v, o, rope)

    def shared_attention(self, name: str, source: int, width: int, share: float) -> SharedAttention:
        """Over the keys of a layer of the model, which adds so much of itself."""
        keys = self.model.layers[source].mixer
        assert isinstance(keys, Attention)
        queries = keys.num_heads * keys.head_size
        q = self.linear(f"{name}.q", self.noise(queries, width))
        o = self.linear(f"{name}.o", share * self.noise(width, queries))
        heads = keys.num_heads, keys.num_kv_heads, keys.head_size
        return SharedAttention(source, *heads, keys.scale, q, o, keys.rope, keys.window)

    def random_feed_forward(self, width: int) -> FeedForward:
        inner = self._recipe.feed_forward_size
        up, down = self.linear("up", self.noise(inner, width)), self.linear("down", self.noise(width, inner))
        return FeedForward("gelu_tanh", up, down, self.linear("gate", self.noise(inner, width)))

    def feed_forward(self) -> FeedForward:
        """The model's last one."""
        (own,) = [part for _, part in self.model.feed_forwards()][-1:]
        assert own.gate is not None
        gate, up, down = (self.linear(one.weight, self.values_of(one.weight)) for one in (own.gate, own.up, own.down))
        return FeedForward(own.activation, up, down, gate)

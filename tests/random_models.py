"""Models of random weights of any type, made in memory straight from a `ModelSpec`: any mixture of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.expert_norms import ExpertNorms
from realizar.models.layer_inputs import InputGate, LayerInputs
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import Activation, Linear, Norm, QueryGrowth, Rope
from realizar.models.spec import Attention, ExpertLinear, Experts, FeedForward, Layer, Mixer, ModelSpec
from realizar.models.tensor_source import TensorSource
from realizar.quantization.random_blocks import random_blocks

_PATH = Path("random.gguf")


@dataclass(frozen=True)
class Recipe:
    """The parts of a random model.

    Attributes:
        windows: one layer each.
        weights: ggml type of all matrices but the embedding, which is F16 and not tied.
        parts: of the architecture: `biases`, `layer_norm`, `qk_norm`, `token_norm`, `sinks`, `soft_cap`, `post_norms`,
            `ungated`, `partial_rope`, `interleaved`, `no_rope`, `undivided`, `value_norm`, `k_is_v` (in layers
            without a window), `output_scale`, `output_gate` (of attention), `growth` (of its queries, from token
            8 on), `tiled` (value heads of delta nets). Of
            mixtures: `expert_biases`, `ungated_experts`, `sigmoid`, `selection_bias`, `groups` (2 of 4), `shared`,
            `shared_gate`, `clamped`, `expert_scales`, and `own_norms`, which need `shared`.
        lacking: what each of the first layers does not have, a `mixer` or a `feed_forward`; None has both.
        experts: of every layer but the last of several, in place of its feed-forward, whose size one expert then has.
            The part `undivided` leaves their weights as the softmax has them. per_token: experts of a token.
        router_weights: ggml type of routers. down_weights: of experts' down projections; None takes that of `weights`.
        full_head_size: of layers without a window, which then have one KV head; 0 takes that of the others.
        input_size: of each layer's own input; 0 where layers have none.
        sources: of each of the first layers, the one whose keys and values it takes; None has its own.
        recurrent: what each of the first layers has in place of attention, a `delta` net or a short `convolution`; None
            has attention.
        key_heads, value_heads, key_size, value_size: of delta nets. length: tokens that convolutions see.
    """

    head_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_size: int = 256
    feed_forward_size: int = 512
    vocab_size: int = 160
    windows: tuple[int | None, ...] = (None, 40)
    weights: str = "Q4_0"
    parts: tuple[str, ...] = ()
    activation: Activation = "silu"
    context_length: int = 1024
    seed: int = 0
    lacking: tuple[Literal["mixer", "feed_forward"] | None, ...] = ()
    experts: int = 0
    per_token: int = 2
    router_weights: str = "F32"
    down_weights: str | None = None
    full_head_size: int = 0
    input_size: int = 0
    sources: tuple[int | None, ...] = ()
    recurrent: tuple[Literal["delta", "convolution"] | None, ...] = ()
    key_heads: int = 2
    value_heads: int = 6
    key_size: int = 32
    value_size: int = 32
    length: int = 4


class _Maker:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.rng = recipe, np.random.default_rng(recipe.seed)
        self.stored: dict[str, StoredTensor] = {}

    def matrix(self, name: str, rows: int, cols: int, kind: str | None = None) -> str:
        ggml_type = GGMLType[kind or self.recipe.weights]
        assert cols % ggml_type.block_size == 0, f"{name} has {cols} columns"
        data = random_blocks(ggml_type, rows, cols, self.rng, 1 / math.sqrt(cols))
        self.stored[name] = StoredTensor(name, ggml_type, (rows, cols), data, _PATH, 0)
        return name

    def vector(self, name: str, size: int, centre: float) -> str:
        values = (centre + 0.2 * self.rng.standard_normal(size)).astype(np.float32)
        self.stored[name] = StoredTensor(name, GGMLType.F32, (size,), values.view(np.uint8), _PATH, 0)
        return name

    def linear(self, name: str, rows: int, cols: int) -> Linear:
        bias = self.vector(f"{name}.bias", rows, 0.0) if "biases" in self.recipe.parts else None
        return Linear(self.matrix(f"{name}.weight", rows, cols), rows, cols, bias)

    def norm(self, name: str, size: int) -> Norm:
        if "layer_norm" not in self.recipe.parts:
            return Norm("rms", 1e-5, self.vector(f"{name}.weight", size, 1.0))
        return Norm("layer", 1e-5, self.vector(f"{name}.weight", size, 1.0), self.vector(f"{name}.bias", size, 0.0))

    def rope(self, size: int) -> Rope | None:
        parts = self.recipe.parts
        if "no_rope" in parts:
            return None
        half = size // 4 if "partial_rope" in parts else size // 2
        frequencies = tuple(float(np.float32(1000.0 ** (-i / half))) for i in range(half))
        return Rope("interleaved" if "interleaved" in parts else "neox", frequencies)

    def head_shape(self, window: int | None) -> tuple[int, int]:
        """Head size and KV heads of attention."""
        is_wide = window is None and self.recipe.full_head_size > 0
        return (self.recipe.full_head_size, 1) if is_wide else (self.recipe.head_size, self.recipe.num_kv_heads)

    def shared_attention(self, name: str, window: int | None, source: int) -> SharedAttention:
        recipe, parts, (size, kv_heads) = self.recipe, self.recipe.parts, self.head_shape(window)
        queries = recipe.num_heads * size
        return SharedAttention(
            source, recipe.num_heads, kv_heads, size, 1 / math.sqrt(size),
            self.linear(f"{name}.q", queries, recipe.hidden_size),
            self.linear(f"{name}.o", recipe.hidden_size, queries), rope=self.rope(size), window=window,
            soft_cap=3.0 if "soft_cap" in parts else None,
            q_norm=self.norm(f"{name}.q_norm", size) if "qk_norm" in parts else None,
        )  # fmt: skip

    def attention(self, name: str, window: int | None) -> Attention:
        recipe, parts = self.recipe, self.recipe.parts
        hidden, (size, kv_heads) = recipe.hidden_size, self.head_shape(window)
        queries, keys = recipe.num_heads * size, kv_heads * size
        q_norm = k_norm = None
        if "qk_norm" in parts:
            q_norm, k_norm = self.norm(f"{name}.q_norm", size), self.norm(f"{name}.k_norm", size)
        elif "token_norm" in parts:
            q_norm, k_norm = self.norm(f"{name}.q_norm", queries), self.norm(f"{name}.k_norm", keys)
        q, k = self.linear(f"{name}.q", queries, hidden), self.linear(f"{name}.k", keys, hidden)
        return Attention(
            recipe.num_heads, kv_heads, size, 1 / math.sqrt(size), q, k,
            k if "k_is_v" in parts and window is None else self.linear(f"{name}.v", keys, hidden),
            self.linear(f"{name}.o", hidden, queries),
            rope=self.rope(size), window=window, soft_cap=3.0 if "soft_cap" in parts else None, q_norm=q_norm,
            k_norm=k_norm, qk_norm_axis="token" if "token_norm" in parts else "head",
            sinks=self.vector(f"{name}.sinks", recipe.num_heads, 1.0) if "sinks" in parts else None,
            v_norm_eps=1e-5 if "value_norm" in parts else None,
            gate=self.linear(f"{name}.output_gate", queries, hidden) if "output_gate" in parts else None,
            query_growth=QueryGrowth(0.1, 8) if "growth" in parts else None,
        )  # fmt: skip

    def mixer(self, index: int, name: str, window: int | None) -> Mixer:
        recurrent, sources = self.recipe.recurrent, self.recipe.sources
        source = sources[index] if index < len(sources) else None
        if source is not None:
            return self.shared_attention(name, window, source)
        kind = recurrent[index] if index < len(recurrent) else None
        if kind is None:
            return self.attention(name, window)
        return self.delta_net(name) if kind == "delta" else self.short_convolution(name)

    def kernel(self, name: str, channels: int) -> str:
        self.vector(name, channels * self.recipe.length, 0.0)
        self.stored[name] = replace(self.stored[name], shape=(channels, self.recipe.length))
        return name

    def short_convolution(self, name: str) -> ShortConvolution:
        channels = self.recipe.hidden_size
        return ShortConvolution(
            channels, self.recipe.length, self.linear(f"{name}.in", 3 * channels, channels),
            self.kernel(f"{name}.kernel", channels), self.linear(f"{name}.out", channels, channels),
            self.vector(f"{name}.kernel_bias", channels, 0.0) if "biases" in self.recipe.parts else None,
        )  # fmt: skip

    def delta_net(self, name: str) -> GatedDeltaNet:
        """Its states keep about nine tenths at each token."""
        recipe, hidden = self.recipe, self.recipe.hidden_size
        keys, values = recipe.key_heads * recipe.key_size, recipe.value_heads * recipe.value_size
        sizes = {"q": keys, "k": keys, "v": values, "z": values}
        sizes |= {"beta": recipe.value_heads, "decay": recipe.value_heads}
        return GatedDeltaNet(
            recipe.key_heads, recipe.value_heads, recipe.key_size, recipe.value_size, recipe.length,
            **{part: self.linear(f"{name}.{part}", size, hidden) for part, size in sizes.items()},
            kernel=self.kernel(f"{name}.kernel", 2 * keys + values),
            decay_bias=self.vector(f"{name}.decay_bias", recipe.value_heads, 0.0),
            rate=self.vector(f"{name}.rate", recipe.value_heads, -2.0),
            norm=Norm("rms", 1e-5, self.vector(f"{name}.head_norm", recipe.value_size, 1.0)),
            out=self.linear(f"{name}.out", hidden, values),
            rate_is_log=True, tiled="tiled" in recipe.parts,
        )  # fmt: skip

    def feed_forward(self, name: str) -> FeedForward:
        recipe = self.recipe
        hidden, width = recipe.hidden_size, recipe.feed_forward_size
        gate = None if "ungated" in recipe.parts else self.linear(f"{name}.gate", width, hidden)
        up, down = self.linear(f"{name}.up", width, hidden), self.linear(f"{name}.down", hidden, width)
        return FeedForward(recipe.activation, up, down, gate)

    def expert_linear(self, name: str, rows: int, cols: int, kind: str | None = None) -> ExpertLinear:
        count, ggml_type = self.recipe.experts, GGMLType[kind or self.recipe.weights]
        self.matrix(name, count * rows, cols, ggml_type.name)
        self.stored[name] = replace(self.stored[name], shape=(count, rows, cols))
        if "expert_biases" not in self.recipe.parts:
            return ExpertLinear(name, count, rows, cols)
        bias = self.vector(f"{name}.bias", count * rows, 0.0)
        self.stored[bias] = replace(self.stored[bias], shape=(count, rows))
        return ExpertLinear(name, count, rows, cols, bias)

    def mixture(self, name: str) -> Experts:
        recipe, parts = self.recipe, self.recipe.parts
        hidden, width = recipe.hidden_size, recipe.feed_forward_size
        weight = self.matrix(f"{name}.router", recipe.experts, hidden, recipe.router_weights)
        bias = self.vector(f"{name}.router.bias", recipe.experts, 0.0) if "expert_biases" in parts else None
        router = Linear(weight, recipe.experts, hidden, bias)
        ungated = "ungated_experts" in parts
        gate = None if ungated else self.expert_linear(f"{name}.gate_experts", width, hidden)
        up = self.expert_linear(f"{name}.up_experts", width, hidden)
        down = self.expert_linear(f"{name}.down_experts", hidden, width, recipe.down_weights)
        divided = "undivided" not in parts
        return Experts(
            router, recipe.per_token, recipe.activation, gate, up, down, divided, 1.0 if divided else 2.5,
            scoring="sigmoid" if "sigmoid" in parts else "softmax",
            selection_bias=self.vector(f"{name}.selection", recipe.experts, 0.0) if "selection_bias" in parts else None,
            num_groups=4 if "groups" in parts else 1, groups_per_token=2 if "groups" in parts else 1,
            shared=self.feed_forward(f"{name}.shared") if "shared" in parts else None,
            clamped="clamped" in parts,
            shared_gate=self.linear(f"{name}.shared_gate", 1, hidden) if "shared_gate" in parts else None,
            expert_scales=self.vector(f"{name}.scales", recipe.experts, 1.0) if "expert_scales" in parts else None,
            norms=self.expert_norms(f"{name}.own") if "own_norms" in parts else None,
        )  # fmt: skip

    def expert_norms(self, name: str) -> ExpertNorms:
        hidden = self.recipe.hidden_size
        router = replace(self.norm(f"{name}.router", hidden), weight_scale=0.5)
        others = (self.norm(f"{name}.{part}", hidden) for part in ("experts", "shared", "sum", "output"))
        return ExpertNorms(router, *others)

    def input_gate(self, name: str) -> InputGate | None:
        hidden, size = self.recipe.hidden_size, self.recipe.input_size
        if not size:
            return None
        gate, projection = self.linear(f"{name}.gate", size, hidden), self.linear(f"{name}.projection", hidden, size)
        return InputGate(self.recipe.activation, gate, projection, self.norm(f"{name}.norm", hidden))

    def layer_inputs(self) -> LayerInputs | None:
        recipe, size = self.recipe, self.recipe.input_size
        if not size:
            return None
        width = len(recipe.windows) * size
        projection = Linear(
            self.matrix("layer_projection.weight", width, recipe.hidden_size), width, recipe.hidden_size
        )
        norm = Norm("rms", 1e-5, self.vector("layer_norm.weight", size, 1.0))
        return LayerInputs(size, self.matrix("layer_table", recipe.vocab_size, width), 8.0, projection, norm, 0.75)

    def layer(self, index: int, window: int | None) -> Layer:
        name, recipe = f"layers.{index}", self.recipe
        lacks = recipe.lacking[index] if index < len(recipe.lacking) else None
        post, hidden = "post_norms" in recipe.parts, recipe.hidden_size
        mixes, feeds = lacks != "mixer", lacks != "feed_forward"
        is_mixture = recipe.experts > 0 and (index < len(recipe.windows) - 1 or len(recipe.windows) == 1)
        feed, own = (self.mixture if is_mixture else self.feed_forward), is_mixture and "own_norms" in recipe.parts
        feed_forward = feed(name) if feeds else None
        return Layer(
            self.mixer(index, name, window) if mixes else None, feed_forward,
            input_norm=self.norm(f"{name}.input_norm", hidden) if mixes else None,
            post_mixer_norm=self.norm(f"{name}.post_attention_norm", hidden) if mixes and post else None,
            pre_feedforward_norm=self.norm(f"{name}.pre_norm", hidden) if feeds and not own else None,
            post_feedforward_norm=self.norm(f"{name}.post_norm", hidden) if feeds and post else None,
            input_gate=self.input_gate(f"{name}.input"),
            output_scale=self.vector(f"{name}.output_scale", 1, 0.75) if "output_scale" in recipe.parts else None,
        )  # fmt: skip


def random_model(recipe: Recipe) -> tuple[ModelSpec, Checkpoint]:
    """The model of a recipe."""
    maker, hidden = _Maker(recipe), recipe.hidden_size
    embedding = maker.matrix("embedding", recipe.vocab_size, hidden, "F16")
    layers = tuple(maker.layer(index, window) for index, window in enumerate(recipe.windows))
    inputs = maker.layer_inputs()
    final, head = maker.norm("final_norm", hidden), maker.linear("head", recipe.vocab_size, hidden)
    tensors = {
        name: TensorSource(name, tensor.shape, per_expert=name.endswith("experts.bias"))
        for name, tensor in maker.stored.items()
    }
    spec = ModelSpec(
        "random", recipe.vocab_size, hidden, recipe.context_length, embedding, layers, final, head,
        embedding_scale=4.0, tensors=tensors, layer_inputs=inputs,
    )  # fmt: skip
    return spec, Checkpoint(_PATH, "gguf", {}, maker.stored)


def random_tokens(recipe: Recipe, count: int, seed: int = 1) -> Sequence[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, recipe.vocab_size, count)]

"""`SpecBuilder`: the parts of a decoder-only model, from which an architecture's file composes its layers.

Each method returns a part of the spec and notes where its tensors lie. numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import numpy as np

from realizar.models.dimensions import MAX_CONTEXT, Dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.layer_inputs import LayerInputs
from realizar.models.multimodal import is_other_part, text_prefix
from realizar.models.parts import Activation, Linear, Norm, QueryGrowth, Rope
from realizar.models.spec import AnyFeedForward, Attention, FeedForward, Layer, Mixer, ModelSpec
from realizar.models.tensor_names import EMBEDDING, FINAL_NORM, HEAD, is_unneeded, stored_name
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.tensors import is_stored

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu_squared",
}


_COMPARED = 1 << 20  # bytes at a time


class SpecBuilder:
    """Builds the parts of one model's spec.

    Args:
        norm_weight_offset: see `Norm`; used only for Hugging Face checkpoints, as GGUF converters add it.
        activation_key: key of `config.json` for the non-linearity of feed-forwards, which a GGUF file implies by its
            architecture; None where no configuration says it. `default_activation` is for a missing key.
        is_part: safetensors checkpoints hold a larger model of which this is the text model.
        names, gguf_names: names of safetensors checkpoints and of GGUF files that differ from the usual ones, by
            canonical name; see `tensor_names`.
        rename: gives a safetensors checkpoint's name for the one that follows from all this.

    Attributes:
        activation: of feed-forwards.
    """

    def __init__(
        self,
        hparams: HyperParameters,
        sizes: Dimensions,
        *,
        norm_kind: Literal["rms", "layer"] = "rms",
        norm_weight_offset: float = 0.0,
        norm_bias: bool = False,
        activation_key: str | None = "hidden_act",
        default_activation: Activation = "silu",
        is_part: bool = False,
        names: Mapping[str, str] | None = None,
        gguf_names: Mapping[str, str] | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.hparams = hparams
        self.sizes = sizes
        self.activation = _read_activation(hparams, activation_key, default_activation)
        self._norm_kind = norm_kind
        self._norm_weight_offset = 0.0 if hparams.is_gguf else norm_weight_offset
        self._norm_bias = norm_bias
        self._prefix = text_prefix(hparams) if is_part else ("model.", "")
        self._is_unneeded = is_other_part if is_part else is_unneeded
        self._names = (gguf_names if hparams.is_gguf else names) or {}
        self._rename = rename
        self._tensors: dict[TensorName, TensorSource] = {}

    def stored_name(self, canonical: TensorName) -> str:
        name = stored_name(canonical, self._names, is_gguf=self.hparams.is_gguf)
        if self.hparams.is_gguf:
            return name
        if name.startswith("model."):
            return self._rename(self._prefix[0] + name.removeprefix("model."))
        return self._prefix[1] + name

    def has(self, canonical: TensorName) -> bool:
        return is_stored(self.hparams.checkpoint, self.stored_name(canonical))

    def bias(self, hf_key: str | None, projection: str, *, default: bool = False, layer: int = 0) -> bool:
        """True if a projection has a bias, by `config.json`, or by the tensors of GGUF's `layer`, which has it.

        Args:
            hf_key: None if a configuration has no key for it.
            projection: name in a layer, or `lm_head`.
        """
        if self.hparams.is_gguf:
            base = "" if projection == "lm_head" else f"model.layers.{layer}."
            return self.has(f"{base}{projection}.bias") or default
        return default if hf_key is None else self.hparams.boolean(None, hf_key, default=default)

    def attention_biases(self, hf_key: str = "attention_bias", *, layer: int = 0) -> tuple[bool, bool]:
        """True for each of Q, K and V, and the output projection, that has a bias; see `bias`."""
        return self.bias(hf_key, "self_attn.q_proj", layer=layer), self.bias(hf_key, "self_attn.o_proj", layer=layer)

    def norm(self, base: str, size: int | None = None) -> Norm:
        """The norm named `base`, over `size` elements (the hidden size where None)."""
        shape = (self.sizes.hidden_size if size is None else size,)
        weight = self._note(f"{base}.weight", shape)
        bias = self._note(f"{base}.bias", shape) if self._norm_bias else None
        return Norm(self._norm_kind, self.sizes.norm_eps, weight, bias, self._norm_weight_offset)

    def linear(self, base: str, out_features: int, in_features: int, *, bias: bool) -> Linear:
        weight = self._note(f"{base}.weight", (out_features, in_features))
        bias_name = self._note(f"{base}.bias", (out_features,)) if bias else None
        return Linear(weight, out_features, in_features, bias_name)

    def vector(
        self,
        index: int,
        name: str,
        size: int,
        *,
        gguf: str,
        hf: str | None = None,
        stored_shape: tuple[int, ...] | None = None,
    ) -> TensorName:
        """A vector of layer `index` that belongs to no norm and no matrix, by its names after the layer's.

        Args:
            hf: in a safetensors checkpoint, where that is not the canonical `name`.
            stored_shape: there, see `TensorSource`.
        """
        canonical = f"model.layers.{index}.{name}"
        if self.hparams.is_gguf:
            return self.note(canonical, TensorSource(f"blk.{index}.{gguf}", (size,)))
        stored = self.stored_name(f"model.layers.{index}.{hf or name}")
        return self.note(canonical, TensorSource(stored, (size,), stored_shape=stored_shape))

    def fused(
        self, base: str, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, count: int = 1
    ) -> list[Linear]:
        """Matrices one below the other in the tensor `base`; `parts` are names and out_features of each, in order.

        With a `count` these out_features follow each other so many times: those of the matrices alternate.
        """
        first, matrices = 0, []
        for name, run in parts:
            places = TensorSource(self.stored_name(f"{base}.weight"), (count * run, in_features), first, fused=True)
            if count > 1:
                places = replace(places, step=sum(each for _, each in parts), run=run)
            weight, bias_name = self.note(f"{name}.weight", places), None
            if bias:
                places = replace(places, name=self.stored_name(f"{base}.bias"), shape=(count * run,))
                bias_name = self.note(f"{name}.bias", places)
            matrices.append(Linear(weight, count * run, in_features, bias_name))
            first += run
        return matrices

    def kernel(self, base: str, channels: int, length: int) -> TensorName:
        """A convolution over each channel's tokens, [channels, length], which Hugging Face stores with an axis more."""
        name = f"{base}.weight"
        stored_shape = None if self.hparams.is_gguf else (channels, 1, length)
        return self.note(name, TensorSource(self.stored_name(name), (channels, length), stored_shape=stored_shape))

    def attention(
        self,
        index: int,
        *,
        rope: Rope | None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        biases: tuple[bool, bool] = (False, False),
        qk_norm: Literal["head", "token"] | None = None,
        query_growth: QueryGrowth | None = None,
        output_gate: bool = False,
        sees_images_whole: bool = False,
    ) -> Attention:
        """Attention of layer `index`; `scale` None is the inverse root of the head size.

        The biases are of Q, K and V, and of the output projection.
        With an output gate, each head of queries is followed by that of the gate in the matrix of queries.
        """
        sizes, base, (qkv_bias, output_bias) = self.sizes, f"model.layers.{index}.self_attn", biases
        q_features, kv_features = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
        parts = [(f"{base}.q_proj", q_features), (f"{base}.k_proj", kv_features), (f"{base}.v_proj", kv_features)]
        gate = None
        if output_gate:
            halves = [(f"{base}.{name}_proj", sizes.head_size) for name in ("q", "gate")]
            q, gate = self.fused(f"{base}.q_proj", halves, sizes.hidden_size, bias=qkv_bias, count=sizes.num_heads)
            k, v = (self.linear(name, n, sizes.hidden_size, bias=qkv_bias) for name, n in parts[1:])
        elif self.has(f"{base}.qkv_proj.weight"):
            q, k, v = self.fused(f"{base}.qkv_proj", parts, sizes.hidden_size, bias=qkv_bias)
        else:
            q, k, v = (self.linear(name, n, sizes.hidden_size, bias=qkv_bias) for name, n in parts)
        q_norm = k_norm = None
        if qk_norm is not None:
            q_norm = self.norm(f"{base}.q_norm", sizes.head_size if qk_norm == "head" else q_features)
            k_norm = self.norm(f"{base}.k_norm", sizes.head_size if qk_norm == "head" else kv_features)
        return Attention(
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            scale=sizes.head_size**-0.5 if scale is None else scale,
            q=q,
            k=k,
            v=v,
            o=self.linear(f"{base}.o_proj", sizes.hidden_size, q_features, bias=output_bias),
            rope=rope,
            window=window,
            soft_cap=soft_cap,
            q_norm=q_norm,
            k_norm=k_norm,
            qk_norm_axis=qk_norm or "head",
            query_growth=query_growth,
            gate=gate,
            sees_images_whole=sees_images_whole,
        )

    def feed_forward(
        self,
        index: int,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        *,
        bias: bool = False,
        part: str = "mlp",
        width: int | None = None,
    ) -> FeedForward:
        """The dense feed-forward of layer `index`, or another `part` of it of that `width`.

        `names` are of its matrices; there is no gate where they are two.
        """
        hidden, base = self.sizes.hidden_size, f"model.layers.{index}.{part}"
        width = self.sizes.feed_forward_size if width is None else width
        *inner, last = (f"{base}.{name}" for name in names)
        if len(inner) == 2 and self._is_gate_fused(base, width):
            matrices = self.fused(f"{base}.gate_up_proj", [(name, width) for name in inner], hidden, bias=bias)
        else:
            matrices = [self.linear(name, width, hidden, bias=bias) for name in inner]
        gate = matrices[0] if len(matrices) == 2 else None
        return FeedForward(self.activation, matrices[-1], self.linear(last, hidden, width, bias=bias), gate)

    def layers(
        self,
        mixer: Callable[[int], Mixer],
        feed_forward: Callable[[int], AnyFeedForward],
        *,
        norms: Literal["before", "after", "both"] = "before",
        residual_scale: float = 1.0,
        indices: Iterable[int] | None = None,
    ) -> list[Layer]:
        """Layers of parts by index, by default all, with norms before mixers and feed-forwards, after, or both."""
        before, after = norms != "after", norms != "before"

        def layer(index: int) -> Layer:
            def norm(name: str, is_there: bool) -> Norm | None:
                return self.norm(f"model.layers.{index}.{name}_layernorm") if is_there else None

            return Layer(
                mixer=mixer(index),
                feed_forward=feed_forward(index),
                input_norm=norm("input", before),
                post_mixer_norm=norm("post_attention", after),
                pre_feedforward_norm=norm("pre_feedforward" if after else "post_attention", before),
                post_feedforward_norm=norm("post_feedforward", after),
                residual_scale=residual_scale,
            )

        return [layer(index) for index in (range(self.sizes.num_layers) if indices is None else indices)]

    def windows(self, is_windowed: Callable[[int], bool], *, default: int | None = None) -> list[int | None]:
        """The attention window of each layer of `windowed_layers`; one as long as the context is dropped."""
        keys = ("attention.sliding_window", "sliding_window")
        stated = self.hparams.integer(*keys, low=0, high=MAX_CONTEXT, default=0)
        window = stated if self.hparams.is_present(*keys) else default
        if not window or window >= self.sizes.context_length:
            window = None
        return [window if flag else None for flag in self.windowed_layers(is_windowed)]

    def windowed_layers(self, is_windowed: Callable[[int], bool]) -> list[bool]:
        """`layer_types` of `config.json` or the GGUF window pattern (one flag per layer, or the period whose last layer
        is full) says which layers have a window (and its rope), and `is_windowed` where the checkpoint does not.
        """
        key, count = "attention.sliding_window_pattern", self.sizes.num_layers
        kinds = self.hparams.layer_types(count, "full_attention", "sliding_attention")
        if kinds is not None:
            return [kind == "sliding_attention" for kind in kinds]
        stated: Any = self.hparams.raw(key, None)
        if stated is None:
            return [is_windowed(index) for index in range(count)]
        is_period = isinstance(stated, Integral) and not isinstance(stated, bool)
        if is_period:
            return [stated == 0 or (index + 1) % int(stated) != 0 for index in range(count)]
        if isinstance(stated, str | Integral) or not hasattr(stated, "__len__") or len(stated) != count:
            raise self.hparams.malformed(key, None, f"expected a list of {count}, one per layer")
        return [bool(flag) for flag in stated]

    def spec(
        self,
        layers: Sequence[Layer],
        *,
        tied_by_default: bool,
        head_bias: bool = False,
        head_size: int | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_soft_cap: float | None = None,
        is_ignored: Callable[[str], bool] = lambda _: False,
        layer_inputs: LayerInputs | None = None,
        is_causal: bool = True,
    ) -> ModelSpec:
        """The whole model.

        Args:
            tied_by_default: the head is the embedding unless `config.json` decides, or the checkpoint has a head of
                other values. A GGUF file is tied if it has no `output.weight`.
            head_bias: logits have a bias, tied or not.
            head_size: rows of a head that is not tied, where these are not those of the embedding.
            is_ignored: True for further checkpoint names that are known and not needed.
            is_causal: what the keys must say where they say whether tokens see those behind them.
        """
        sizes, hparams = self.sizes, self.hparams
        embedding = self._note(EMBEDDING, (sizes.vocab_size, sizes.hidden_size))
        if hparams.is_gguf:
            tied = not self.has(HEAD)
        else:
            tied = hparams.boolean(None, "tie_word_embeddings", default=tied_by_default) and not self._has_own_head()
        stored = hparams.checkpoint.tensors
        ignored = {name for name in stored if self._is_unneeded(name) or is_ignored(name)}
        if tied:
            bias = self._note("lm_head.bias", (sizes.vocab_size,)) if head_bias else None
            head = Linear(embedding, sizes.vocab_size, sizes.hidden_size, bias)
            ignored.add(self.stored_name(HEAD))
        else:
            head = self.linear("lm_head", head_size or sizes.vocab_size, sizes.hidden_size, bias=head_bias)
        final_norm = self.norm(FINAL_NORM)
        hparams.only("attention.causal", "is_causal", is_causal)
        hparams.refuse_unread()
        return ModelSpec(
            architecture=hparams.architecture,
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            context_length=sizes.context_length,
            embedding=embedding,
            layers=tuple(layers),
            final_norm=final_norm,
            head=head,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
            logit_soft_cap=logit_soft_cap,
            tensors=self._tensors,
            ignored_tensors=frozenset(ignored),
            layer_inputs=layer_inputs,
        )

    def _has_own_head(self) -> bool:
        """True if the checkpoint has a head of the embedding's shape with other values: then it is not tied."""
        stored = self.hparams.checkpoint.tensors
        head, embedding = stored.get(self.stored_name(HEAD)), stored.get(self.stored_name(EMBEDDING))
        if head is None or embedding is None or head.shape != embedding.shape:
            return False
        if (head.type_name, head.data.size) != (embedding.type_name, embedding.data.size):
            return True
        return any(
            not np.array_equal(head.data[start : start + _COMPARED], embedding.data[start : start + _COMPARED])
            for start in range(0, head.data.size, _COMPARED)
        )

    def _is_gate_fused(self, base: str, width: int) -> bool:
        """True if gate and up are one matrix, which GGUF files name like the up projection, without a gate."""
        if self.hparams.is_gguf:
            stored = self.hparams.checkpoint.tensors.get(self.stored_name(f"{base}.gate_up_proj.weight"))
            is_double = stored is not None and stored.shape[:1] == (2 * width,)
            return is_double and not self.has(f"{base}.gate_proj.weight")
        return self.has(f"{base}.gate_up_proj.weight")

    def note(self, canonical: TensorName, source: TensorSource) -> TensorName:
        """Say where a tensor lies that no other method describes; gives its name back."""
        self._tensors[canonical] = source
        return canonical

    def _note(self, canonical: TensorName, shape: tuple[int, ...]) -> TensorName:
        return self.note(canonical, TensorSource(self.stored_name(canonical), shape))


def _read_activation(hparams: HyperParameters, hf_key: str | None, default: Activation) -> Activation:
    name = hparams.text(None, hf_key, default="")
    if name and name not in _ACTIVATIONS:
        raise hparams.unsupported(None, hf_key, name)
    return _ACTIVATIONS.get(name, default)

"""The parts that a description of a model is made of: matrices, norms, rotations. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.models.tensor_source import TensorName

Activation = Literal["silu", "gelu_tanh", "gelu", "relu_squared"]
"""`gelu_tanh` is GELU approximated by tanh; `relu_squared` is max(x, 0) ** 2."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last dimension: `normalised * (weight + weight_offset) * weight_scale + bias`; of
    kind `scale` it normalises nothing.

    `weight_offset` is 1 where the checkpoint stores weights around zero (gemma from Hugging Face).
    """

    kind: Literal["rms", "layer", "scale"]
    eps: float
    weight: TensorName
    bias: TensorName | None = None
    weight_offset: float = 0.0
    weight_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Clamps:
    """The least and the largest number that a matrix reads, and that it gives; others become these."""

    read: tuple[float, float]
    given: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x @ weight.T + bias`, with x and y within `clamps`, which matrices of towers alone have."""

    weight: TensorName
    out_features: int
    in_features: int
    bias: TensorName | None = None
    clamps: Clamps | None = None


@dataclass(frozen=True, slots=True)
class NextTokenInputs:
    """What a next-token block begins with, in place of the embedding x of a token:

    of_token(token_norm(x)) + of_state(state_norm(h))

    h is the hidden state after the final norm of the token before, by the model that the block drafts for, or by the
    block itself where that token is a draft; zeros before the first token. Checkpoints have both matrices side by side
    in one.
    """

    token_norm: Norm
    state_norm: Norm
    of_token: Linear
    of_state: Linear


@dataclass(frozen=True, slots=True)
class Fusion:
    """The state that a drafter reads of a token, made of a model's: `output_norm(linear(norm(streams)))`.

    Attributes:
        layers: of the model; the residual streams after them lie side by side, in this order.
        norm: over all of them; None where there is none, as for `output_norm`.
    """

    layers: tuple[int, ...]
    linear: Linear
    norm: Norm | None = None
    output_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PairedInputs:
    """What a drafter of one layer (EAGLE-3) begins with, in place of the embedding x of a token.

    Its attention reads token_norm(x) and state_norm(h) side by side, and its stream begins with h. h is the `fusion` of
    the token before, by the model that it drafts for; where that token is a draft, its stream there before the final
    norm; zeros before the first token.

    Attributes:
        normed_stream: the stream begins with state_norm(h).
    """

    token_norm: Norm
    state_norm: Norm
    fusion: Fusion
    normed_stream: bool = False


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What a drafter of several tokens at once (DFlash) reads of its model.

    The keys and values of a token of the model are, in each layer, K and V of the token's `fusion`: no layer computes
    any for it. A block is the embedding of the row's last token and those of `mask_id` behind it; its tokens see each
    other and all before. What a mask leaves is the token at its own place.

    Attributes:
        size: tokens of a block in training, of which one is the row's.
    """

    fusion: Fusion
    mask_id: int
    size: int


@dataclass(frozen=True, slots=True)
class AssistantInputs:
    """What a drafter that reads its model's keys and values (Gemma 4's assistants) begins with, and what it hands on.

    of_token(x) + of_state(h)

    x is the model's embedding of a row's last token, and h the model's hidden state after the final norm of the token
    before it. Where x is that of a draft, h is `to_state` of the drafter's own state, after its final norm, that the
    draft was made from. Each layer is a `SharedAttention` over the keys and values of a layer of the model, or has no
    mixer: all drafts are at the position of the row's last token, and see what the token before that one saw.
    """

    of_token: Linear
    of_state: Linear
    to_state: Linear


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `2 * len(inverse_frequencies)` dimensions of a head.

    Attributes:
        pairing: `neox` pairs dimension i with i + size/2, `interleaved` 2 i with 2 i + 1.
        inverse_frequencies: radians per position, scaling (linear, llama-3, YaRN, longrope) applied; float32 values.
        magnitude: multiplies cosine and sine (YaRN, longrope).
        axes: of each frequency the axis whose position it is multiplied with, where tokens have several; empty where
            they have one.
    """

    pairing: Literal["neox", "interleaved"]
    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0
    axes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by `1 + factor * ln(1 + floor(position / period))`, after rope; `period` in tokens."""

    factor: float
    period: int


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that a rank computes, of several that compute it together; see `shard`."""

    rank: int = 0
    ranks: int = 1

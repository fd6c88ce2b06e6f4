"""Mixers other than attention over a layer's own keys and values. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from realizar.models.parts import Linear, Norm, Rope
from realizar.models.tensor_source import TensorName


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention whose keys and values are those of layer `source`, of the same window; see `Attention` for the rest.

    In a drafter with `AssistantInputs` the layer is its model's.
    """

    source: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    q: Linear
    o: Linear
    rope: Rope | None = None
    window: int | None = None
    soft_cap: float | None = None
    q_norm: Norm | None = None

    # What `Attention` may have, and this has not.
    k_norm: ClassVar[None] = None
    qk_norm_axis: ClassVar[Literal["head"]] = "head"
    sinks: ClassVar[None] = None
    query_growth: ClassVar[None] = None
    v_norm_eps: ClassVar[None] = None
    gate: ClassVar[None] = None
    sees_images_whole: ClassVar[Literal[False]] = False

    def linears(self) -> tuple[Linear, ...]:
        return self.q, self.o


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Gated short convolution over each channel's last tokens (LFM2).

    b, c, x = the three thirds of in_proj(input), in this order, [channels] each
    y[t] = c[t] * (sum over j < length of kernel[:, j] * (b * x)[t - (length - 1) + j]  + bias)
    output = out_proj(y)

    Tokens before the first count as zeros. A sequence keeps the last `length - 1` columns of b * x from step to step.

    Attributes:
        in_proj: to 3 * channels features.
        kernel: [channels, length].
        bias: [channels], or None.
    """

    channels: int
    length: int
    in_proj: Linear
    kernel: TensorName
    out_proj: Linear
    bias: TensorName | None = None

    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj, self.out_proj


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A recurrence whose state forgets, and learns what it lacks of each token's value (Qwen3-Next, Qwen3.5).

    u[t] = silu(sum over j < length of kernel[:, j] * (q, k, v of token t - (length - 1) + j))
    q, k = the parts of u, each head divided by sqrt(sum of its squares + 1e-6); q also by sqrt(key_size)
    beta = sigmoid(beta(input)),  decay = exp(rate * softplus(decay(input) + decay_bias)), one of each for a value head

    Each value head h has a state S, float32 [key_size, value_size], and reads one key head:

    S = decay * S
    S = S + outer(k, beta * (v - k @ S))
    o = q @ S

    output = out(norm(o) * silu(z(input)))

    Tokens before the first count as zeros, and S begins as zeros. A sequence keeps S, and the last `length - 1` tokens
    of q, k and v before the convolution.

    Attributes:
        num_key_heads: of q and k. num_value_heads: of v, z, beta, decay and the output; a multiple of `num_key_heads`.
        key_size, value_size: of a head.
        length: tokens that the convolution sees.
        q, k: to num_key_heads * key_size features. v, z: to num_value_heads * value_size.
        beta, decay: to one feature for each value head.
        kernel: [channels, length], channels being those of q, k and v in this order.
        decay_bias: float32 [num_value_heads].
        rate: float32 [num_value_heads], below zero; the logarithm of its negative where `rate_is_log`.
        norm: over each head of `o`.
        tiled: value head h reads key head h % num_key_heads; else h // (num_value_heads / num_key_heads).
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    length: int
    q: Linear
    k: Linear
    v: Linear
    z: Linear
    beta: Linear
    decay: Linear
    kernel: TensorName
    decay_bias: TensorName
    rate: TensorName
    norm: Norm
    out: Linear
    rate_is_log: bool = False
    tiled: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    def inputs(self) -> tuple[Linear, ...]:
        """The matrices that read the layer's input, in the order in which the recurrence takes their outputs."""
        return self.q, self.k, self.v, self.z, self.beta, self.decay

    def linears(self) -> tuple[Linear, ...]:
        return *self.inputs(), self.out

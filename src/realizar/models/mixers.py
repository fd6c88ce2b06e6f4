"""Mixers other than attention over a layer's own keys and values. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realizar.cache_kinds import CacheKind, StateCache
from realizar.models.tensor_source import TensorName

if TYPE_CHECKING:
    from realizar.models.spec import Linear, Norm, Rope


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention whose keys and values are those of an earlier layer; see `Attention` for what both have.

    Attributes:
        source: index of the layer with `Attention` whose keys and values these are, of the same window.
        num_kv_heads: of that layer.
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

    @property
    def cache_kind(self) -> None:
        """It keeps nothing of its own."""
        return None

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return self.q, self.o

    def vectors(self) -> Iterator[TensorName]:
        """Its tensors other than matrices and the biases of matrices."""
        if self.q_norm is not None:
            yield from self.q_norm.vectors()


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

    @property
    def cache_kind(self) -> CacheKind:
        """Kind of the cache group that a layer with this mixer belongs to."""
        return StateCache()

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return self.in_proj, self.out_proj

    def vectors(self) -> Iterator[TensorName]:
        """Its tensors other than matrices and the biases of matrices."""
        yield self.kernel
        if self.bias is not None:
            yield self.bias

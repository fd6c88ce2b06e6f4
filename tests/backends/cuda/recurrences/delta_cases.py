"""Gated delta nets as the kernels take them, and their twin in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Net:
    """Sizes of a net and its vectors, random."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    length: int = 4
    tiled: bool = False
    seed: int = 0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.value_heads * self.value

    @property
    def width(self) -> int:
        """Columns of the inputs: channels, z, betas, decays."""
        return self.channels + self.value_heads * (self.value + 2)

    def vectors(self) -> tuple[Array, Array, Array]:
        """Kernel [channels, length], decay bias and rate [value heads]."""
        random = np.random.default_rng(self.seed)
        kernel = random.normal(0, 0.5, (self.channels, self.length))
        rate = -np.exp(random.normal(-2, 1, self.value_heads))
        made = kernel, random.normal(0, 1, self.value_heads), rate
        return tuple(each.astype(np.float32) for each in made)  # type: ignore[return-value]

    def inputs(self, tokens: int, seed: int) -> Array:
        """float32 [tokens, width]."""
        random = np.random.default_rng((self.seed, seed))
        return random.standard_normal((tokens, self.width)).astype(np.float32)

    def kept(self, inputs: Array) -> Array:
        """[tokens, channels + 2 value heads]: what a ring keeps of inputs."""
        return np.concatenate([inputs[:, : self.channels], inputs[:, -2 * self.value_heads :]], axis=1)

    def run(self, inputs: Array, state: Array | None = None, before: Array | None = None) -> tuple[Array, Array]:
        """Outputs [tokens, value heads * value] before the norm, and the states after all, in float64.

        Args:
            state: [value heads, key, value] before the tokens. before: inputs of the tokens before them.
        """
        kernel, bias, rate = (each.astype(np.float64) for each in self.vectors())
        tokens, past = len(inputs), self.length - 1
        x = np.zeros((past, self.width)) if before is None else before.astype(np.float64)
        x = np.concatenate([np.zeros((past, self.width)), x])[-past:]
        x = np.concatenate([x, inputs.astype(np.float64)])
        mixed = sum(x[j : j + tokens, : self.channels] * kernel[:, j] for j in range(self.length))
        mixed = mixed / (1 + np.exp(-mixed))
        size = self.key_heads * self.key
        q, k = (mixed[:, at : at + size].reshape(tokens, self.key_heads, -1) for at in (0, size))
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        ratio = self.value_heads // self.key_heads
        q, k = (np.tile(a, (1, ratio, 1)) if self.tiled else np.repeat(a, ratio, axis=1) for a in (q, k))
        v = mixed[:, 2 * size :].reshape(tokens, self.value_heads, -1)
        beta = 1 / (1 + np.exp(-inputs[:, -2 * self.value_heads : -self.value_heads].astype(np.float64)))
        decay = np.exp(rate * np.logaddexp(0, inputs[:, -self.value_heads :] + bias))
        s = np.zeros((self.value_heads, self.key, self.value)) if state is None else state.astype(np.float64)
        out = np.zeros_like(v)
        for t in range(tokens):
            s = s * decay[t, :, None, None]
            lacking = beta[t, :, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], s))
            s = s + np.einsum("hk,hv->hkv", k[t], lacking)
            out[t] = np.einsum("hk,hkv->hv", q[t] / np.sqrt(self.key), s)
        return out.reshape(tokens, -1), s

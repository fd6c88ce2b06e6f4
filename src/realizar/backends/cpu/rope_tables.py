"""Cosines and sines of a step's positions, one table per kind of rope in the model, and how queries grow with them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import address, aligned_zeros
from realizar.models.parts import QueryGrowth, Rope
from realizar.models.spec import ModelSpec


class RopeTables:
    """float32 [tokens, half] cosines and sines, and [tokens] factors of queries, rewritten every step."""

    def __init__(self, spec: ModelSpec, max_tokens: int) -> None:
        ropes = {attention.rope for _, attention in spec.all_attentions() if attention.rope is not None}
        self._frequencies: dict[Rope, NDArray[np.float32]] = {
            rope: np.array(rope.inverse_frequencies, np.float32) for rope in ropes
        }
        self._tables = {
            rope: [aligned_zeros(max_tokens * values.size, np.float32) for _ in range(2)]
            for rope, values in self._frequencies.items()
        }
        growths = {attention.query_growth for _, attention in spec.attentions() if attention.query_growth is not None}
        self._growths = {growth: aligned_zeros(max_tokens, np.float32) for growth in growths}

    def query_scales(self, growth: QueryGrowth | None) -> int:
        """The address of queries' factors; zero where they do not grow."""
        return 0 if growth is None else address(self._growths[growth])

    def addresses(self, rope: Rope | None) -> tuple[int, int]:
        """Addresses of cosines and sines; zeros without rope."""
        if rope is None:
            return 0, 0
        cosine, sine = self._tables[rope]
        return address(cosine), address(sine)

    def fill(self, positions: NDArray[np.int32]) -> None:
        """Write the rows of a step's tokens, whose positions are int32 [tokens]; angles are float32, as in training."""
        for rope, frequencies in self._frequencies.items():
            angles = (positions.astype(np.float32)[:, None] * frequencies).ravel()
            cosine, sine = self._tables[rope]
            np.multiply(np.cos(angles), np.float32(rope.magnitude), out=cosine[: angles.size])
            np.multiply(np.sin(angles), np.float32(rope.magnitude), out=sine[: angles.size])
        for growth, factors in self._growths.items():
            factors[: positions.size] = 1 + growth.factor * np.log(1 + positions // growth.period)

"""Where the operands of one tile product lie."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cpu.emit import Value


@dataclass(frozen=True, slots=True)
class TileAddresses:
    """Where a tile and its tokens lie: addresses of codes, scales, supers, codebook table and first activation record,
    bytes between tokens, and the number of groups of 32 columns."""

    codes: Value
    scales: Value
    supers: Value
    table: Value
    activations: Value
    token_stride: Value
    groups: Value

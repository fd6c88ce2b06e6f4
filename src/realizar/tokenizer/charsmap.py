"""SentencePiece's compiled normalisation (`precompiled_charsmap`), checked before the tokenizers library walks it.

Layout: the trie's size in bytes (u32), the trie, which is a double array of u32 units as darts-clone builds it, and the
replacements, each ended by a NUL, that its leaves point to. The library checks none of it: a wrong size makes it
allocate gigabytes and abort, and a wrong offset makes it panic at the first text. numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CHARSMAP_BYTES = 4 << 20
"""SentencePiece's own, with all of NFKC, have 250 to 350 KB."""

_LABELS = np.arange(1, 256, dtype=np.uint32)
_CHUNK = 4096


class CharsmapError(ValueError):
    """A compiled normalisation is malformed; the message is the reason."""


def longest_replacement(charsmap: bytes) -> int:
    """In bytes; CharsmapError where it is larger than `MAX_CHARSMAP_BYTES`, or an offset points outside."""
    if len(charsmap) > MAX_CHARSMAP_BYTES:
        raise CharsmapError(f"{len(charsmap)} bytes, above {MAX_CHARSMAP_BYTES}")
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 8 or size % 4 or not 4 <= size <= len(charsmap) - 4:
        raise CharsmapError("the size of its trie does not fit")
    units = np.frombuffer(charsmap, "<u4", size // 4, 4)
    replacements = np.frombuffer(charsmap, np.uint8, offset=4 + size)
    try:
        charsmap[4 + size :].decode()
    except UnicodeDecodeError:
        raise CharsmapError("its replacements are not UTF-8") from None
    starts = _values(units)
    if len(starts) == 0:
        return 0
    if starts.max() >= len(replacements) or ((replacements[starts] & 0xC0) == 0x80).any():
        raise CharsmapError("its trie points to no replacement")
    ends = np.append(np.flatnonzero(replacements == 0), len(replacements))
    return int((ends[np.searchsorted(ends, starts)] - starts).max())


def _values(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """uint32: the values of the trie's leaves that a text can reach."""
    visited = np.zeros(len(units), np.bool_)
    bases = _offsets(units[:1])
    values = [np.zeros(0, np.uint32)]
    while len(bases):
        if (bases | 255).max() >= len(units):
            raise CharsmapError("its trie points outside itself")
        found = [_children(units, bases[start : start + _CHUNK]) for start in range(0, len(bases), _CHUNK)]
        nodes = np.unique(np.concatenate(found))
        nodes = nodes[~visited[nodes]]
        visited[nodes] = True
        bases = nodes ^ _offsets(units[nodes])
        leaves = bases[(units[nodes] >> 8) & 1 == 1]
        if len(leaves) and leaves.max() >= len(units):
            raise CharsmapError("its trie points outside itself")
        values.append(units[leaves] & 0x7FFFFFFF)
    return np.concatenate(values)


def _children(units: NDArray[np.uint32], bases: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """uint32: places of the nodes' child units; a unit is a child if it has the label that leads to it."""
    places = bases[:, None] ^ _LABELS
    children: NDArray[np.uint32] = places[units[places] & 0x800000FF == _LABELS]
    return children


def _offsets(units: NDArray[np.uint32]) -> NDArray[np.uint32]:
    offsets: NDArray[np.uint32] = np.left_shift(units >> 10, (units & 0x200) >> 6, dtype=np.uint32)
    return offsets

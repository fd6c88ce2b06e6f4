"""The kinds of cache that a layer keeps of each sequence from step to step. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class FullCache:
    """Keys and values of every token."""


@dataclass(frozen=True, slots=True)
class WindowCache:
    """Keys and values of the last `window` tokens; older ones are never read again."""

    window: int


@dataclass(frozen=True, slots=True)
class LatentCache:
    """One low-rank vector for every token, from which keys and values of all heads are computed."""


@dataclass(frozen=True, slots=True)
class StateCache:
    """A state of fixed size for each sequence, which every token overwrites (convolutions, recurrences)."""


CacheKind = FullCache | WindowCache | LatentCache | StateCache

_NAMES: dict[type[CacheKind], str] = {
    FullCache: "keys and values of all tokens",
    WindowCache: "keys and values of a window of tokens",
    LatentCache: "latent vectors of all tokens",
    StateCache: "a state of fixed size",
}


def kind_name(kind: CacheKind) -> str:
    return _NAMES[type(kind)]


def attention_cache(window: int | None) -> FullCache | WindowCache:
    """The kind of attention over `window` tokens; None is attention over all tokens."""
    return FullCache() if window is None else WindowCache(window)


def attention_window(kind: CacheKind) -> int | None:
    """The number of tokens that the cache keeps of a sequence; None keeps all.

    It raises UnsupportedModelError if the kind keeps no keys and values.
    """
    if isinstance(kind, WindowCache):
        return kind.window
    if isinstance(kind, FullCache):
        return None
    raise UnsupportedModelError(f"the KV cache has blocks of keys and values, and not {kind_name(kind)}")

"""`FetchSpeed`: how soon a snapshot comes from the host's memory, and how soon what it saves is computed.

Loading measures both. They are kept in the user's cache, where `realizar plan` finds them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realizar.backends.resolved_config import ResolvedConfig
from realizar.errors import HubError
from realizar.hub.folders import user_cache

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchSpeed:
    """`fetch_s`: seconds in which a snapshot comes from the host. `tokens_per_s`: of a prompt that is read alone."""

    fetch_s: float
    snapshot_bytes: int
    tokens_per_s: float

    @property
    def least_tokens(self) -> int:
        """Tokens from which on fetching a snapshot of them is faster than computing them."""
        return max(math.ceil(self.fetch_s * self.tokens_per_s), 1)

    def __str__(self) -> str:
        return (
            f"fetched in {1000 * self.fetch_s:.3g} ms ({self.snapshot_bytes / self.fetch_s / 1e9:.3g} GB/s), as"
            f" {self.least_tokens} tokens at {self.tokens_per_s:,.0f}/s are computed"
        )


def keep_speed(path: Path, config: ResolvedConfig, speed: FetchSpeed) -> None:
    try:
        kept = _record(path, config)
        kept.parent.mkdir(parents=True, exist_ok=True)
        written = kept.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(speed))
        written.replace(kept)
    except (OSError, HubError) as error:
        _LOG.debug("the speed of fetching is not kept: %s", error)


def known_speed(path: Path, config: ResolvedConfig) -> FetchSpeed | None:
    """The speed that was measured when the model was last loaded on this device; None where it never was."""
    try:
        speed = msgspec.json.decode(_record(path, config).read_bytes(), type=FetchSpeed)
    except (OSError, HubError, msgspec.MsgspecError):
        return None
    return speed if speed.fetch_s > 0 and speed.tokens_per_s > 0 else None


def _record(path: Path, config: ResolvedConfig) -> Path:
    """The file of a model on a device. Speeds depend on little else; the model's own path names it."""
    name = hashlib.sha256(f"{config.chosen.label}\n{path.absolute()}".encode()).hexdigest()[:32]
    return user_cache() / "fetch-speeds" / f"{name}.json"

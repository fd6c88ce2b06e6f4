"""Who comes first, who gives way, and what fills a step first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.scheduler.sequence import Sequence


def order(sequence: Sequence) -> int:
    """Sort key of admission, smallest first: first come, first served. The largest gives way when blocks run out."""
    return sequence.sequence_id


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step's token budget is filled.

    Attributes:
        first: `decode` keeps running streams at their pace; `prefill` reads every prompt that fits before anyone
            decodes, so that the two phases are apart (benchmarks).
    """

    first: Literal["decode", "prefill"] = "decode"

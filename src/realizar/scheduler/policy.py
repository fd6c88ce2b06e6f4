"""Who comes first, who gives way, and what fills a step first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.scheduler.sequence import Sequence


def order(sequence: Sequence) -> tuple[int, int]:
    """Sort key of admission, smallest first: by priority, then by arrival. The largest gives way for lack of blocks."""
    return sequence.request.priority, sequence.sequence_id


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step's token budget is filled.

    Attributes:
        first: `decode` keeps running streams at their pace; `prefill` reads every prompt that fits before anyone
            decodes, so that the two phases are apart (benchmarks).
        stretch: times as long as a step of decodes alone that a step may take when prompts are read beside them;
            infinite where throughput is all and nobody watches a stream.
    """

    first: Literal["decode", "prefill"] = "decode"
    stretch: float = 2.5

"""Who comes first, who gives way, and what fills a step first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.scheduler.sequence import Sequence

ARRIVALS_PER_PRIORITY = 64
"""Later arrivals that a sequence lets pass for every step of priority between them."""


def order(sequence: Sequence) -> int:
    """Sort key of admission, smallest first. The largest gives way for lack of blocks.

    Priority moves a sequence forward or back in the order of arrival. Whoever waits is so overtaken by a bounded number
    of others, however urgent those that keep coming are: waiting counts as much as urgency.
    """
    return sequence.sequence_id + ARRIVALS_PER_PRIORITY * sequence.request.priority


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

"""The order of sequences in admission and preemption, and the phase that fills a step first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.scheduler.sequence import Sequence

TURNS_PER_PRIORITY = 64
"""Later turns that a sequence lets pass for every step of priority between them."""


def order(sequence: Sequence) -> tuple[float, int]:
    """Sort key of admission, smallest first. Under pressure the largest running one is preempted.

    Clients' sequences start in turn, those of one turn and of one client in the order of arrival. Priority moves a
    sequence forward or back by turns. A bounded number of later sequences overtake one that waits, however urgent they
    are.
    """
    return sequence.turn + TURNS_PER_PRIORITY * sequence.request.priority, sequence.sequence_id


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a step's token budget is filled.

    Attributes:
        first: `decode` keeps running streams at their pace; `prefill` reads every prompt that fits before any
            decode, so that the two phases are apart (benchmarks).
        stretch: times as long as a step of decodes alone that a step may take when prompts are read beside them;
            infinite where only throughput counts.
        least_step_s: seconds that such a step may take in any case: a fast device would otherwise read prompts in
            small chunks, to keep a pace that nobody can read.
    """

    first: Literal["decode", "prefill"] = "decode"
    stretch: float = 2.5
    least_step_s: float = 0.012

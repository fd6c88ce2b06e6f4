"""Recorded continuations and the divergence of scored rows from them, for tests and scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP = 20
KEYS = {"smollm2": "smollm2-135m-instruct-q4_1", "gemma3": "gemma-3-270m-q4_k_m"}

Row = Sequence[Sequence[float]]  # (id, log-probability), most probable first


def divergence(exact: Row, other: Row) -> float:
    """KL(exact || other) in nats, over the ids that both rows name and all the rest as one event."""
    found = {int(token): logprob for token, logprob in other}
    both = [(logprob, found[int(token)]) for token, logprob in exact if int(token) in found]
    rest_exact = max(1.0 - math.fsum(math.exp(p) for p, _ in both), 0.0)
    rest_other = max(1.0 - math.fsum(math.exp(q) for _, q in both), 1e-9)
    total = math.fsum(math.exp(p) * (p - q) for p, q in both)
    return total + (rest_exact * math.log(rest_exact / rest_other) if rest_exact > 0 else 0.0)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""The figures of a mix: for each kind, and for all, what was answered, how fast, and how evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.bench.mix.generators import MixRun
from realizar.bench.mix.run import Served
from realizar.bench.serve_report import Percentiles

ALL = "all"
LONG_GAP = 20.0
"""A gap of more than so many times its stream's median is counted as a stall."""


@dataclass(frozen=True, slots=True)
class Multiples:
    """Gaps between the deltas of streams, as multiples of their stream's median. Deltas of one read have no gap.

    Attributes:
        p50, p99, p99_9, max: over all gaps.
        num_gaps: of streams with two gaps and more.
        num_stalls: gaps above 20 times the median.
    """

    p50: float
    p99: float
    p99_9: float
    max: float
    num_gaps: int
    num_stalls: int


@dataclass(frozen=True, slots=True)
class KindFigures:
    """The requests of one kind, or of all.

    Attributes:
        num_requests: sent. num_failed: of them not answered whole. num_left: clients that left, as they were asked to.
        num_cut: under way when the load's time was over. num_shortened: that the context did not hold.
        errors: what failed, and how often.
        prompt_tokens, output_tokens: within the load's time. The server's counts; of a client that left or was cut,
            the words of a prompt whose answer had begun, and the deltas.
        prompt_tokens_per_s, output_tokens_per_s: over the load's time.
        ttft: to the first text; gap: between deltas of a stream. Milliseconds.
        multiples: the gaps beside their stream's median; None without any.
    """

    kind: str
    num_requests: int
    num_failed: int
    num_left: int
    num_cut: int
    num_shortened: int
    errors: Mapping[str, int]
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: Percentiles | None
    gap: Percentiles | None
    multiples: Multiples | None


def figures_by_kind(runs: Sequence[MixRun]) -> list[KindFigures]:
    """Figures of each kind over the rounds of one load, in the kinds' alphabetical order, and last of all together."""
    kinds = sorted({each.kind for run in runs for each in run.served})
    return [*(_figures(kind, runs) for kind in kinds), _figures(ALL, runs)]


def output_rate(run: MixRun) -> float:
    """Output tokens per second of all kinds of a run."""
    return sum(_tokens_within(run, each)[1] for each in run.served) / run.duration_s


def _figures(kind: str, runs: Sequence[MixRun]) -> KindFigures:
    taken = [(run, each) for run in runs for each in run.served if kind in (each.kind, ALL)]
    served = [each for _, each in taken]
    duration_s = sum(run.duration_s for run in runs)
    counts = [_tokens_within(run, each) for run, each in taken]
    prompt_tokens, output_tokens = (round(sum(count[place] for count in counts)) for place in (0, 1))
    good = [each.answered for each in served if each.answered.error is None]
    errors = Counter(each.answered.error for each in served if each.answered.error is not None)
    return KindFigures(
        kind=kind,
        num_requests=len(served),
        num_failed=sum(errors.values()),
        num_left=sum(each.answered.left and not each.was_cut for each in served),
        num_cut=sum(each.was_cut for each in served),
        num_shortened=sum(each.was_shortened for each in served),
        errors=dict(errors),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft=Percentiles.of_seconds([answered.ttft_s for answered in good if answered.deltas_s]),
        gap=Percentiles.of_seconds([gap for answered in good for gap in answered.gaps_s]),
        multiples=_multiples(served),
    )


def _tokens_within(run: MixRun, served: Served) -> tuple[float, float]:
    """Prompt tokens and output tokens of a request that fall into the load's time.

    An answer's tokens are spread over its deltas: a delta may hold several, and a token may have no text.
    """
    answered, end_s = served.answered, run.start_s + run.duration_s
    if answered.error is not None:
        return 0.0, 0.0
    deltas = sum(delta_s <= end_s for delta_s in answered.deltas_s)
    if not answered.deltas_s:
        inside = float(answered.ended_s <= end_s and not answered.left)
        return inside * answered.prompt_tokens, inside * answered.output_tokens
    prompt_tokens = answered.prompt_tokens or served.num_words
    return prompt_tokens * bool(deltas), answered.output_tokens * deltas / len(answered.deltas_s)


def _multiples(served: Sequence[Served]) -> Multiples | None:
    found: list[NDArray[np.float64]] = []
    for each in served:
        gaps = np.asarray(each.answered.gaps_s)
        gaps = gaps[gaps > 0]  # deltas of one read arrived together
        if len(gaps) > 1:
            found.append(gaps / np.median(gaps))
    if not found:
        return None
    every = np.concatenate(found)
    p50, p99, p99_9 = (float(value) for value in np.percentile(every, (50, 99, 99.9)))
    return Multiples(p50, p99, p99_9, float(every.max()), len(every), int((every > LONG_GAP).sum()))

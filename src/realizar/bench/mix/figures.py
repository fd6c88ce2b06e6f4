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
"""A gap of more than this multiple of its stream's median is counted as a stall."""


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
    return [*(_figures(kind, runs) for kind in kinds), figures_of_all(runs)]


def figures_of_all(runs: Sequence[MixRun]) -> KindFigures:
    """Figures of all kinds together."""
    return _figures(ALL, runs)


def output_rate(run: MixRun) -> float:
    """Output tokens per second of all kinds of a run."""
    return sum(_tokens_within(run, each)[1] for each in run.served) / run.duration_s


@dataclass(frozen=True, slots=True)
class SettledRates:
    """Tokens per second of the requests that ended within the later part of a load's time, prompt and answer alike.

    A load's first requests come all at once, and at its end prompts have been read whose answers are still to come: the
    shorter the load, the more of its tokens are of prompts. These are whole requests, so their tokens are in the mix's
    own ratio.

    Attributes:
        num_requests: that have begun to answer and ended.
    """

    num_requests: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float


def settled_rates(run: MixRun, settle_s: float) -> SettledRates:
    """The rates once a load has run for `settle_s`."""
    begin_s, end_s = run.start_s + settle_s, run.start_s + run.duration_s
    ended = [each for each in run.served if each.error is None and each.num_deltas and begin_s <= each.ended_s <= end_s]
    prompts = sum(each.prompt_tokens or each.num_words for each in ended)
    seconds = max(end_s - begin_s, 1e-9)
    return SettledRates(len(ended), prompts / seconds, sum(each.output_tokens for each in ended) / seconds)


def _figures(kind: str, runs: Sequence[MixRun]) -> KindFigures:
    taken = [(run, each) for run in runs for each in run.served if kind in (each.kind, ALL)]
    served = [each for _, each in taken]
    duration_s = sum(run.duration_s for run in runs)
    counts = [_tokens_within(run, each) for run, each in taken]
    prompt_tokens, output_tokens = (round(sum(count[place] for count in counts)) for place in (0, 1))
    good = [each for each in served if each.error is None]
    errors = Counter(each.error for each in served if each.error is not None)
    gaps_s = np.concatenate([np.empty(0, np.float32), *(each.gaps_s for each in good)])
    return KindFigures(
        kind=kind,
        num_requests=len(served),
        num_failed=sum(errors.values()),
        num_left=sum(each.left for each in served),
        num_cut=sum(each.was_cut for each in served),
        num_shortened=sum(each.was_shortened for each in served),
        errors=dict(errors),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft=Percentiles.of_seconds([each.first_s - each.due_s for each in good if each.first_s is not None]),
        gap=_percentiles(gaps_s),
        multiples=_multiples(good),
    )


def _tokens_within(run: MixRun, served: Served) -> tuple[float, float]:
    """Prompt tokens and output tokens of a request that fall into the load's time.

    An answer's tokens are spread over its deltas: a delta may hold several, and a token may have no text.
    """
    if served.error is not None:
        return 0.0, 0.0
    if not served.num_deltas:
        is_inside = served.ended_s <= run.start_s + run.duration_s and not (served.left or served.was_cut)
        return float(is_inside) * served.prompt_tokens, float(is_inside) * served.output_tokens
    prompt_tokens = served.prompt_tokens or served.num_words
    return prompt_tokens * float(served.num_within > 0), served.output_tokens * served.num_within / served.num_deltas


def _percentiles(values_s: NDArray[np.float32]) -> Percentiles | None:
    """As `Percentiles.of_seconds`, for millions of values."""
    if not len(values_s):
        return None
    p50, p90, p99 = (1000 * float(value) for value in np.percentile(values_s, (50, 90, 99)))
    return Percentiles(1000 * float(values_s.mean(dtype=np.float64)), p50, p90, p99, 1000 * float(values_s.max()))


def _multiples(served: Sequence[Served]) -> Multiples | None:
    found = [each.gaps_s / each.median_gap_s for each in served if len(each.gaps_s) > 1]
    if not found:
        return None
    every = np.concatenate(found)
    p50, p99, p99_9 = (float(value) for value in np.percentile(every, (50, 99, 99.9)))
    return Multiples(p50, p99, p99_9, float(every.max()), len(every), int((every > LONG_GAP).sum()))

"""The figures of a mix, counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from realizar.bench.mix.compare import MixResult, MixTarget
from realizar.bench.mix.dialects import REALIZAR
from realizar.bench.mix.generators import MixRun
from realizar.bench.mix.report import as_markdown, figures_by_kind, output_rate, settled_rates
from realizar.bench.mix.requests import MixRequest
from realizar.bench.mix.run import Served
from realizar.bench.serve_client import Answered, Call, Target

START_S, SECONDS = 100.0, 10.0


def served(kind: str, deltas_s: Sequence[float], **changes: Any) -> Served:
    """A request that was due at the start, and whose deltas came so many seconds later."""
    times = tuple(START_S + delta_s for delta_s in deltas_s)
    given: dict[str, Any] = {
        "due_s": START_S, "sent_s": START_S, "deltas_s": times, "ended_s": times[-1] if times else START_S + 1,
        "prompt_tokens": 50, "output_tokens": len(times),
    }  # fmt: skip
    request = MixRequest(kind, Call(b"", False), 40, 8)
    return Served.of(request, Answered(**{**given, **changes}), START_S + SECONDS)


def run(*requests: Served, busy: tuple[float, ...] = (0.2, 0.1), label: str = "mix") -> MixRun:
    return MixRun("it", label, START_S, SECONDS, list(requests), busy)


def test_tokens_are_counted_within_the_time() -> None:
    """Of 12 tokens in 4 deltas one delta came too late; a token without text belongs to its answer's deltas."""
    whole = served("greedy", [1, 2, 9, 11], output_tokens=12)
    silent = served("greedy", [], output_tokens=1)
    failed = served("greedy", [1, 2], error="status 500")
    late = served("dry", [10.5], output_tokens=7)
    left = served("dry", [1, 2, 3], prompt_tokens=0, left=True)
    dry, greedy, every = figures_by_kind([run(whole, silent, failed, late, left)])
    assert (greedy.kind, greedy.num_requests, greedy.num_failed) == ("greedy", 3, 1)
    assert greedy.errors == {"status 500": 1}
    assert (greedy.prompt_tokens, greedy.output_tokens) == (100, 9 + 1)
    assert (dry.prompt_tokens, dry.output_tokens) == (40, 3), "who leaves brings no counts: words and deltas"
    assert (dry.num_left, dry.num_cut) == (1, 0)
    assert (every.kind, every.num_requests, every.output_tokens_per_s) == ("all", 5, 1.3)
    assert output_rate(run(whole, silent, failed, late, left)) == pytest.approx(1.3)
    assert greedy.ttft is not None
    assert greedy.ttft.p50 == pytest.approx(1000)


def test_settled_rates_are_of_whole_requests() -> None:
    """Those that end too early or too late count neither their prompts nor their answers, nor do those without any."""
    early, late = served("greedy", [1, 2]), served("greedy", [3, 11])
    whole = served("greedy", [1, 2, 6], output_tokens=12)
    left = served("dry", [3, 4], prompt_tokens=0, left=True)
    silent, failed = served("dry", [], ended_s=START_S + 5), served("dry", [5], error="status 500")
    rates = settled_rates(run(early, late, whole, left, silent, failed), 2.5)
    assert rates.num_requests == 2
    assert rates.prompt_tokens_per_s == pytest.approx((50 + 40) / 7.5)
    assert rates.output_tokens_per_s == pytest.approx((12 + 2) / 7.5)


def test_gaps_beside_their_streams_median() -> None:
    """Two streams, one ten times slower: a stall is judged by its own stream. Deltas of one read have no gap."""
    fast = served("greedy", [1.0, 1.0, 1.1, 1.2, 1.3, 4.3])
    slow = served("greedy", [1.0, 2.0, 3.0, 4.0])
    (greedy, _) = figures_by_kind([run(fast, slow)])
    assert greedy.multiples is not None
    assert greedy.multiples.num_gaps == 4 + 3
    assert greedy.multiples.num_stalls == 1
    assert greedy.multiples.max == pytest.approx(30, rel=1e-3)
    assert greedy.multiples.p50 == pytest.approx(1, rel=1e-3)
    assert greedy.multiples.p99_9 > 29
    assert greedy.gap is not None
    assert greedy.gap.max == pytest.approx(3000, rel=1e-3)
    assert figures_by_kind([run(served("greedy", [1.0, 2.0]))])[0].multiples is None


def test_choices_of_an_answer_have_gaps_of_their_own() -> None:
    """Two choices whose deltas alternate: each waits a second, and 0.1 s passes between them."""
    both = served("choices", [1.0, 1.1, 2.0, 2.1, 3.0, 3.1], choices=bytes((0, 1, 0, 1, 0, 1)))
    assert both.gaps_s.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_rounds_are_joined_and_a_busy_generator_is_named() -> None:
    result = MixResult(MixTarget(Target("it", "u", "m"), REALIZAR))
    fast, slow = served("greedy", [1, 2, 3, 4]), served("top-p", [1, 2])
    result.runs = {"greedy": [run(fast), run(fast, fast)], "top-p": [run(slow), run(slow, busy=(0.71, 0.1))]}
    text = as_markdown([result])
    assert "| greedy | 1 | 0 to 1 | 1.00 | 0 |" in text
    assert "| top-p | 0 | 0 to 0 | 0.33 | 0 |" in text, "0.2 of the median of 0.4 and 0.8"
    assert "THE GENERATOR MAY BE THE BOUND" in text
    assert "the busiest of 2 load generators took 0.71 of a core" in text
    result.runs["top-p"] = [run(slow)]
    assert "THE GENERATOR" not in as_markdown([result])

"""The figures of loads, counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_mix import settled_rates

from realizar.bench.serve.client import Answer, Server
from realizar.bench.serve.compare import ServerRuns
from realizar.bench.serve.figures import figures_of, output_rate, parse_objectives
from realizar.bench.serve.load import LoadRun
from realizar.bench.serve.report import as_markdown, as_record
from realizar.bench.serve.workload import PlannedRequest
from realizar.errors import InvalidRequestError

START_S, SECONDS = 100.0, 10.0


def served(kind: str, deltas_s: Sequence[float], *, due_s: float = 0.0, **changes: Any) -> Answer:
    """A request that was due so long after the start, and whose deltas came so many seconds after that."""
    times = np.array(deltas_s) + START_S + due_s
    given: dict[str, Any] = {
        "due_s": START_S + due_s, "sent_s": START_S + due_s, "deltas_s": times, "prompt_tokens": 50,
        "ended_s": times[-1] if len(times) else START_S + 1, "output_tokens": len(times),
    }  # fmt: skip
    return Answer(PlannedRequest(kind, b"", False, 40, 8), **{**given, **changes})


def run(*answers: Answer, busy: tuple[float, ...] = (0.2, 0.1), seconds: float = SECONDS) -> LoadRun:
    return LoadRun(START_S, seconds, list(answers), busy)


def plain(scale: float = 1.0) -> LoadRun:
    """Three whole answers and a failed one, in two seconds."""
    times = [[0.1, 0.2, 0.4], [0.3, 0.35, 0.4], [0.5, 0.9, 1.0]]
    whole = [served("greedy", [scale * delta for delta in deltas], prompt_tokens=10) for deltas in times]
    return run(*whole, served("greedy", [9.0], error="status 500: x"), busy=(0.25,), seconds=2.0)


def test_figures_by_hand() -> None:
    figures = figures_of([plain()], None, {"ttft": 400.0, "tpot": 200.0})
    assert (figures.requests, figures.completed, figures.failed) == (4, 3, 1)
    assert figures.errors == {"status 500: x": 1}
    assert (figures.total_input_tokens, figures.total_output_tokens) == (30, 9)
    assert figures.met == 2, "a failed one meets none"
    record = figures.as_record()
    expected = {
        "output_throughput": 4.5, "total_token_throughput": 19.5, "request_throughput": 1.5, "request_goodput": 1.0,
        "mean_ttft_ms": 300, "median_ttft_ms": 300, "p90_ttft_ms": 460, "max_ttft_ms": 500,
        "std_ttft_ms": 1000 * (0.08 / 3) ** 0.5, "mean_itl_ms": 1000 * (0.1 + 0.2 + 0.05 + 0.05 + 0.4 + 0.1) / 6,
        "median_tpot_ms": 150, "median_e2el_ms": 400, "duration": 2.0,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert figures_of([plain()]).as_record()["request_goodput"] is None


def test_the_record_has_the_names_of_other_programs() -> None:
    """Names of the result file of vLLM's `bench serve`; SGLang's are these but for `total_throughput` and E2EL."""
    of_vllm = {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
    of_vllm |= {"request_goodput", "output_throughput", "total_token_throughput"}
    of_vllm |= {
        f"{which}_{name}_ms" for which in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert of_vllm <= set(figures_of([plain()]).as_record())


def test_a_run_without_answers() -> None:
    failed = run(served("greedy", [9.0], error="status 500: x"))
    figures = figures_of([failed], None, {"ttft": 1.0})
    assert figures.latencies["ttft"] is None
    assert figures.met == 0
    result = ServerRuns(Server("it", "u", "m"), runs={"plain": [failed]})
    assert "1 x status 500" in as_markdown([result], {"ttft": 1.0})


def test_objectives() -> None:
    assert parse_objectives(["ttft:500", "tpot:12.5"]) == {"ttft": 500.0, "tpot": 12.5}
    assert parse_objectives(["e2e:9000"]) == parse_objectives(["e2el:9000"]) == {"e2el": 9000.0}
    for wrong in ("ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "speed:3"):
        with pytest.raises(InvalidRequestError, match="goodput must be of"):
            parse_objectives([wrong])


def test_markdown_and_json() -> None:
    results = [
        ServerRuns(Server(name, "u", "m"), runs={"plain": [plain(scale)]})
        for name, scale in (("ours", 1), ("theirs", 2))
    ]
    text = as_markdown(results)
    assert "|  | ours | theirs |" in text
    values = "300.0 / 300.0 / 460.0 / 496.0 | 600.0 / 600.0 / 920.0 / 992.0"
    assert f"| TTFT, ms: mean / median / p90 / p99 | {values} |" in text
    assert "| median_ttft_ms | 600 | 300 | 0.500 | unknown: one round |" in text
    assert "| output_throughput | 4.5 | 4.5 | 1.000 | unknown: one round |" in text
    record = json.loads(json.dumps(as_record(results, {"seed": 3})))
    assert record["load"] == {"seed": 3}
    ours, theirs = (server["loads"]["plain"] for server in record["servers"])
    assert ours["requests"][0]["deltas_s"] == [0.1, 0.2, 0.4]
    assert theirs["rounds"][0]["median_ttft_ms"] == pytest.approx(600)


def test_tokens_are_counted_within_the_time() -> None:
    """Of 12 tokens in 4 deltas one delta came too late; a token without text belongs to its answer's deltas."""
    whole = served("greedy", [1, 2, 9, 11], output_tokens=12)
    silent = served("greedy", [], output_tokens=1)
    failed = served("greedy", [1, 2], error="status 500")
    late = served("dry", [10.5], output_tokens=7)
    left = served("dry", [1, 2, 3], prompt_tokens=0, left=True)
    load = run(whole, silent, failed, late, left)
    dry, greedy, every = (figures_of([load], kind) for kind in ("dry", "greedy", None))
    assert (greedy.requests, greedy.failed) == (3, 1)
    assert (greedy.completed, every.completed) == (1, 1), "the silent one; the others ended late, failed or left"
    assert greedy.errors == {"status 500": 1}
    assert (greedy.total_input_tokens, greedy.total_output_tokens) == (100, 9 + 1)
    assert (dry.total_input_tokens, dry.total_output_tokens) == (40, 3), "who leaves brings no counts: words and deltas"
    assert (dry.left, dry.cut) == (1, 0)
    assert (every.requests, every.output_throughput) == (5, 1.3)
    assert output_rate(load) == pytest.approx(1.3)
    assert greedy.latencies["ttft"] is not None
    assert greedy.latencies["ttft"].median == pytest.approx(1000)


def test_settled_rates_are_of_whole_requests() -> None:
    """Those that end too early or too late count neither their prompts nor their answers, nor do those without any."""
    early, late = served("greedy", [1, 2]), served("greedy", [3, 11])
    whole = served("greedy", [1, 2, 6], output_tokens=12)
    left = served("dry", [3, 4], prompt_tokens=0, left=True)
    silent, failed = served("dry", [], ended_s=START_S + 5), served("dry", [5], error="status 500")
    num_requests, prompts, generated = settled_rates(run(early, late, whole, left, silent, failed), 2.5)
    assert num_requests == 2
    assert prompts == pytest.approx((50 + 40) / 7.5)
    assert generated == pytest.approx((12 + 2) / 7.5)


def test_gaps_beside_their_streams_median() -> None:
    """Two streams, one ten times slower: a stall is judged by its own stream. Deltas of one read have no gap."""
    fast = served("greedy", [1.0, 1.0, 1.1, 1.2, 1.3, 4.3])
    slow = served("greedy", [1.0, 2.0, 3.0, 4.0])
    greedy = figures_of([run(fast, slow)], "greedy")
    assert greedy.multiples is not None
    assert greedy.multiples.num_gaps == 4 + 3
    assert greedy.multiples.num_stalls == 1
    assert greedy.multiples.max == pytest.approx(30, rel=1e-3)
    assert greedy.multiples.p99_9 > 29
    assert greedy.latencies["itl"] is not None
    assert greedy.latencies["itl"].max == pytest.approx(3000, rel=1e-3)
    assert figures_of([run(served("greedy", [1.0, 2.0]))]).multiples is None


def test_choices_of_an_answer_have_gaps_of_their_own() -> None:
    """Two choices whose deltas alternate: each waits a second, and 0.1 s passes between them."""
    both = served("choices", [1.0, 1.1, 2.0, 2.1, 3.0, 3.1], choices=bytes((0, 1, 0, 1, 0, 1)))
    assert both.gaps_s.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])


def test_rounds_are_joined_and_a_busy_generator_is_named() -> None:
    fast, slow = served("greedy", [1, 2, 3, 4]), served("top-p", [1, 2])
    result = ServerRuns(Server("it", "u", "m"))
    result.runs = {"greedy": [run(fast), run(fast, fast)], "top-p": [run(slow), run(slow, busy=(0.71, 0.1))]}
    text = as_markdown([result])
    assert "| requests (failed) | 3 (0) | 2 (0) |" in text
    assert "| output tokens/s | 0.6 (0.4 to 0.8) | 0.2 (0.2 to 0.2) |" in text
    assert "| of greedy | 1.00 | 0.33 |" in text, "0.2 of the median of 0.4 and 0.8"
    assert "| busiest load generator, share of a core | 0.20 | 0.71 |" in text
    assert "THE GENERATOR MAY BE THE BOUND: the busiest of 2 took 0.71 of a core" in text
    result.runs["top-p"] = [run(slow)]
    assert "THE GENERATOR" not in as_markdown([result])

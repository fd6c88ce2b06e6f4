"""Mixed loads on servers that answer as realizar, vLLM and llama.cpp do."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from realizar.bench.serve import servers
from realizar.bench.serve.client import Server
from realizar.bench.serve.compare import ServerRuns, compare_servers
from realizar.bench.serve.figures import output_rate
from realizar.bench.serve.kinds import parse_weights
from realizar.bench.serve.load import Generators
from realizar.bench.serve.report import as_markdown, as_record
from realizar.bench.serve.servers import find_server
from realizar.bench.serve.workload import Lengths, Workload
from realizar.cli.main import app, run_app
from realizar.errors import InvalidRequestError
from scripted_api import Delta, Script, ScriptedApi, held, words
from waits import HANG_S, wait_until

TOKENS = 8
_NOT_VLLMS = ("typical_p", "mirostat", "dry_multiplier")
_VLLMS_ALONE = ("structured_outputs", "repetition_penalty")


def answer(body: dict[str, Any]) -> Script:
    """As many deltas as tokens were asked for, in each choice."""
    count = min(int(body["max_tokens"]), TOKENS)
    return Script([Delta({"content": "word"}, index=i) for _ in range(count) for i in range(body.get("n", 1))])


def as_vllm(body: dict[str, Any]) -> Script:
    wrong = [name for name in _NOT_VLLMS if name in body]
    wrong += [name for name in ("tool_choice",) if name in body]  # no parser of tool calls was chosen
    return Script(status=400, error=f"unknown {wrong[0]}") if wrong else answer(body)


def as_llama_cpp(body: dict[str, Any]) -> Script:
    wrong = [name for name in _VLLMS_ALONE if name in body]
    if body.get("n", 1) > 1:
        wrong.append("Only one completion choice is allowed")
    return Script(status=400, error=wrong[0]) if wrong else answer(body)


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi(script=answer) as api:
        yield api


def work(**changes: Any) -> Workload:
    given: dict[str, Any] = {"num_requests": 120, "concurrency": 6, "prompt_length": Lengths(3, 9)}
    return Workload(**{**given, "output_tokens": Lengths(TOKENS, TOKENS), **changes})


def load(
    *apis: ScriptedApi, generators: int = 1, kinds: tuple[str, ...] = ("mix",), **changes: Any
) -> list[ServerRuns]:
    found = [find_server(Server(api.owner, api.url, "scripted-1b")) for api in apis]
    given: dict[str, Any] = {"rounds": changes.pop("rounds", 1), "timeout_s": HANG_S, "log": str}
    weights = changes.pop("weights", parse_weights((), "kind"))
    loads = {kind: work(weights=weights if kind == "mix" else {kind: 1.0}, **changes) for kind in kinds}
    with Generators(generators) as processes:
        return compare_servers(found, loads, processes, **given)


def prompts(api: ScriptedApi) -> list[str]:
    return sorted(body.get("prompt") or body["messages"][0]["content"] for body in api.requests)


def test_every_kind_is_tried_and_counted(api: ScriptedApi) -> None:
    (result,) = load(api)
    assert result.left_out == {}
    figures = as_record([result], {})["servers"][0]["loads"]["mix"]
    assert figures["figures"]["requests"] == 120 == sum(kind["requests"] for kind in figures["kinds"].values())
    assert figures["figures"]["failed"] == 0
    assert {request["prompt_tokens"] for request in figures["requests"]} == {7}, "as the server counts"
    choices = sum(body.get("n", 1) for body in api.requests[16:])
    assert figures["figures"]["total_output_tokens"] == choices * TOKENS
    assert len(api.requests) == 120 + 16, "and one request of each kind before"
    assert result.server.context_tokens == 4096, "as /v1/models says"
    kind = figures["kinds"]["temperature-top-p"]
    gaps = 0 if kind["multiples"] is None else kind["multiples"]["num_gaps"]  # a busy client reads deltas at once
    assert gaps <= kind["requests"] * (TOKENS - 1)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_deltas_of_any_sort_count(api: ScriptedApi, name: str) -> None:
    delta = {name: [{"index": 0, "function": {"arguments": "{"}}] if name == "tool_calls" else "word"}
    api.script = lambda body: Script([Delta(delta), Delta({}), Delta(delta)])
    (result,) = load(api, weights={"greedy": 1.0}, num_requests=2, chat=True)
    assert [len(each.deltas_s) for each in result.runs["mix"][0].answers] == [2, 2]


def test_peers_are_spared_what_they_do_not_know() -> None:
    with ScriptedApi(as_vllm, owner="vllm") as vllm, ScriptedApi(as_llama_cpp, owner="llamacpp") as llama:
        results = load(vllm, llama)
    left_out = [dict(result.left_out) for result in results]
    assert set(left_out[0]) == {"typical", "mirostat", "dry", "tools"}
    assert left_out[0]["dry"] == "vLLM has no dry_allowed_length, dry_base, dry_multiplier"
    assert "unknown tool_choice" in left_out[0]["tools"], "what only the server knows, it says"
    assert set(left_out[1]) == {"choices"}
    text, record = as_markdown(results), json.loads(json.dumps(as_record(results, {})))
    for result, shown in zip(results, record["servers"], strict=True):
        assert shown["left_out"] == dict(result.left_out)
        assert shown["loads"]["mix"]["figures"]["failed"] == 0
        assert set(shown["loads"]["mix"]["kinds"]).isdisjoint(shown["left_out"])
    for kind, reason in {**left_out[0], **left_out[1]}.items():
        assert f"- {kind} was left out: {reason}" in text
    assert not any(name in body for name in _NOT_VLLMS for body in vllm.requests)


def test_a_server_that_takes_nothing(api: ScriptedApi) -> None:
    api.script = lambda body: Script(status=400, error="no such model")
    with pytest.raises(InvalidRequestError, match=r"takes none of the kinds: status 400.*no such model"):
        load(api)
    api.script = lambda body: Script(status=500, error="broken")
    with pytest.raises(InvalidRequestError, match=r"status 500.*broken"):
        load(api)


def test_clients_leave_in_mid_stream(api: ScriptedApi) -> None:
    """An answer that would not end: only who leaves gets away. The server sees each of them go."""
    api.script = lambda body: held("abcd" * 5) if body["max_tokens"] > 4 else answer(body)
    kinds = {"greedy": 1.0}
    (result,) = load(api, weights=kinds, leave_share=1.0, num_requests=12, output_tokens=Lengths(6, 6))
    (run,) = result.runs["mix"]
    assert all(each.left and each.error is None and not each.was_cut for each in run.answers)
    assert {len(each.deltas_s) for each in run.answers} <= {0, 1, 2, 3, 4, 5}
    text = as_markdown([result])
    assert "| requests (failed) | 12 (0) |" in text
    assert "| clients that left | 12 |" in text
    wait_until(lambda: api.left >= 12)
    assert api.left == 12


def test_time_ends_a_load(api: ScriptedApi) -> None:
    (result,) = load(api, num_requests=None, seconds=0.3, weights={"greedy": 1.0})
    (run,) = result.runs["mix"]
    assert run.duration_s == 0.3
    due_s = sorted(each.due_s for each in run.answers)
    assert len(due_s) >= 6, "each client sends one at least"
    assert all(time_s < run.start_s + 0.3 for time_s in due_s[6:])


def test_what_is_cut_is_no_failure(api: ScriptedApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that go on long after the time are ended by the clients, and counted apart."""
    monkeypatch.setattr("realizar.bench.serve.load._GRACE_S", 0.2)
    api.script = lambda body: held("abcd" * 5) if body["max_tokens"] > 4 else answer(body)
    (result,) = load(api, num_requests=None, seconds=0.2, weights={"greedy": 1.0}, concurrency=3)
    text = as_markdown([result])
    assert "| requests (failed) | 3 (0) |" in text
    assert "clients that left" not in text
    assert "3 answers were under way long after the end" in text


def test_kinds_in_turn(api: ScriptedApi) -> None:
    (result,) = load(api, kinds=("greedy", "top-p"), rounds=2, num_requests=5)
    assert {label: len(runs) for label, runs in result.runs.items()} == {"greedy": 2, "top-p": 2}
    sent = [(body["temperature"], body["top_p"]) for body in api.requests]
    assert sent == [(0.0, 1.0), (1.0, 0.95), *([(0.0, 1.0)] * 5 + [(1.0, 0.95)] * 5) * 2]
    assert len(set(prompts(api))) == 21, "prompts of its own each time: a cache must not help the later ones"
    rates = [[output_rate(run) for run in result.runs[label]] for label in ("greedy", "top-p")]
    (greedy, top_p) = map(statistics.median, rates)
    text = as_markdown([result])
    assert "|  | greedy | top-p |" in text
    assert f"| of greedy | 1.00 | {top_p / greedy:.2f} |" in text
    cells = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in rates]
    assert f"| output tokens/s | {' | '.join(cells)} |" in text


def test_the_mix_beside_its_kinds(api: ScriptedApi) -> None:
    (result,) = load(api, kinds=("greedy", "mix"), num_requests=40)
    text = as_markdown([result])
    assert set(result.runs) == {"greedy", "mix"}
    assert len(api.requests) == 16 + 80, "each kind is tried once"
    assert "|  | greedy | mix |" in text
    assert "| requests (failed) | 40 (0) | 40 (0) |" in text
    kinds = text[text.index("Kinds of mix:") :]
    assert sum(int(line.split(" | ")[1].split()[0]) for line in kinds.splitlines()[4:] if line.startswith("| ")) == 40


def test_several_generators_send_the_same(api: ScriptedApi) -> None:
    load(api, num_requests=20)
    alone = prompts(api)
    api.requests.clear()
    (result,) = load(api, num_requests=20, generators=3)
    assert prompts(api) == alone
    assert len(result.runs["mix"][0].busy) == 3
    with pytest.raises(InvalidRequestError, match="generators"):
        Generators(0)


def test_arrivals_at_a_rate(api: ScriptedApi) -> None:
    (result,) = load(api, num_requests=30, concurrency=None, rate_per_s=300.0)
    (run,) = result.runs["mix"]
    due = sorted(each.due_s - run.start_s for each in run.answers)
    assert len(due) == 30
    assert due[0] == pytest.approx(0.0)
    assert len(set(due)) == 30


METRICS = """# TYPE {0}num_requests_running gauge
{0}num_requests_running{{model_name="m"}} {1}
{0}num_requests_waiting{{model_name="m"}} 0.0
{0}kv_cache_usage_perc{{model_name="m"}} 0.0
# TYPE {0}generation_tokens counter
{0}generation_tokens_total{{model_name="m"}} {2}
"""


def metrics(text: Callable[[int], str]) -> list[Route]:
    asked: list[int] = []

    async def show(request: Request) -> PlainTextResponse:
        asked.append(1)
        return PlainTextResponse(text(len(asked)))

    return [Route("/metrics", show)]


@pytest.mark.parametrize("prefix", ["realizar:", "vllm:"])
def test_nothing_is_left(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last answer's end and the engine's own are not at one time: a server gets a while to be empty."""
    monkeypatch.setattr(servers, "_WAIT_S", HANG_S)
    routes = metrics(lambda asked: METRICS.format(prefix, {1: 0.0, 2: 2.0}.get(asked, 0.0), 100.0 * asked))
    with ScriptedApi(answer, routes=routes) as api:
        (result,) = load(api, num_requests=4)
    text = as_markdown([result])
    assert "the server holds nothing afterwards (running 0, waiting 0, kv_cache_share 0)" in text
    assert "the server counted output_tokens 200" in text


def test_something_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_WAIT_S", 0.0)
    with ScriptedApi(answer, routes=metrics(lambda _: "llamacpp:requests_processing 1\n")) as api:
        (result,) = load(api, num_requests=4)
    assert "the server STILL HOLDS SOMETHING afterwards (running 1)" in as_markdown([result])


def test_errors_are_counted_by_kind(api: ScriptedApi) -> None:
    api.script = lambda body: Script(status=503, error="full") if len(api.requests) > 3 else answer(body)
    (result,) = load(api, weights={"greedy": 1.0, "top-p": 1.0}, num_requests=10)
    text = as_markdown([result])
    assert "9 x status 503" in text
    assert "| requests (failed) | 10 (9) |" in text
    lines = [line for line in text.splitlines() if line.startswith(("| greedy", "| top-p"))]
    counts = [line.split(" | ")[1].strip(")").split(" (") for line in lines]
    assert [sum(map(int, each)) for each in zip(*counts, strict=True)] == [10, 9]


def test_command(api: ScriptedApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "all.json"
    api.script = lambda body: words("abcd" * 4)
    api.key = "k"
    base = [
        "bench-serve",
        "--url",
        api.url,
        "--api-key",
        "k",
        "--requests",
        "8",
        "--concurrency",
        "2",
        "--generators",
        "1",
    ]
    assert run_app(app, [*base, "--mix", "--json", str(numbers)]) == 0
    record = json.loads(numbers.read_text())
    assert record["load"]["leave_share"] == 0.25
    assert record["load"]["prompt_length"]["source"].startswith("BurstGPT")
    assert len(record["servers"][0]["loads"]["mix"]["requests"]) == 8
    assert run_app(app, [*base, "--mix-weights", "greedy=1", "dry=1", "--prompt-words", "5"]) == 0
    assert run_app(app, [*base, "--kind", "greedy", "dry", "--rounds", "3"]) == 0
    with ScriptedApi(answer) as peer:
        assert run_app(app, [*base, "--kind", "dry", "--peer-url", peer.url]) == 0
        address = peer.url
    shown = capsys.readouterr()
    assert "|  | greedy | dry |" in shown.out
    assert f"|  | {api.url} | {address} |" in shown.out
    assert f"{address} (realizar's names" in shown.out
    assert f"| {api.url} / {address} |" in shown.out, "the first server over the other"
    assert len(peer.requests) == 10, "two before the eight"
    assert "round 3 of 3: " in shown.err


def test_several_numbers_of_open_requests(api: ScriptedApi, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["bench-serve", "--url", api.url, "--num-prompts", "6", "--max-concurrency", "1", "3", "--warmup", "1"]
    assert run_app(app, base) == 0
    assert "|  | 1 open | 3 open |" in capsys.readouterr().out
    assert len(api.requests) == 1 + 2 * 6
    assert run_app(app, [*base, "--kind", "greedy", "dry"]) == 0
    assert "|  | greedy, 1 open | dry, 1 open | greedy, 3 open | dry, 3 open |" in capsys.readouterr().out


def test_a_mix_has_goodput_and_a_picture(api: ScriptedApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "mix.svg"
    options = ["--mix", "--requests", "20", "--leave", "0", "--goodput", "ttft:60000", "--picture", str(picture)]
    assert run_app(app, ["bench-serve", "--url", api.url, *options]) == 0
    assert "(100%)" in capsys.readouterr().out
    assert picture.read_text().count("<polyline") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kind", "greedy", "--mix"), "--kind sends kinds in turn"),
        (("--kind", "nonesuch"), "nonesuch is not a kind"),
        (("--mix-weights", "greedy"), "KIND=WEIGHT"),
        (("--seconds", "3", "--rate", "inf"), "seconds need a rate"),
        (("--random-input", "3"), "--random-input-len needs --protocol"),
        (("--random-range-ratio", "1"), "--random-range-ratio needs --protocol"),
        (("--protocol", "vllm", "--random-range-ratio", "1"), "random-range-ratio must be from 0 to below 1"),
        (("--protocol", "sglang", "--random-output", "0"), "--random-output-len must be at least 1"),
        (("--protocol", "sglang", "--mix"), "--protocol does not go with --mix"),
        (("--protocol", "sglang", "--prompt-words", "3"), "--protocol does not go with --prompt-words"),
        (("--compare", "a.json"), "--compare takes two files"),
        (("--mix", "--seconds", "0"), "seconds must be above 0"),
        (("--mix", "--temperature", "1"), "--temperature does not go with"),
        (("--mix", "--generators", "0"), "generators must be at least 1"),
        (("--mix", "--leave", "2"), "leave must be between 0 and 1"),
    ],
)
def test_refused_options(
    api: ScriptedApi, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run_app(app, ["bench-serve", "--url", api.url, *options]) == 1
    assert message in capsys.readouterr().err
    assert api.requests == []

"""bench-serve's load against a server that notes when it sends what."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realizar.bench.serve import client
from realizar.bench.serve.client import Answer, Server
from realizar.bench.serve.compare import ServerRuns, compare_servers
from realizar.bench.serve.dialects import OPENAI, REALIZAR
from realizar.bench.serve.load import Generators, LoadRun
from realizar.bench.serve.servers import find_server
from realizar.bench.serve.workload import Lengths, Workload
from realizar.cli.main import app, run_app
from realizar.errors import HubError, InvalidRequestError
from scripted_api import Delta, Script, ScriptedApi, held, words
from waits import HANG_S

DELTAS = 11


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    with ScriptedApi(script=lambda body: words("a" * 4 * DELTAS)) as api:
        yield api


def work(**changes: Any) -> Workload:
    given: dict[str, Any] = {"num_requests": 8, "concurrency": 8, "prompt_length": Lengths(5, 5), "exact": True}
    return Workload(**{**given, "weights": {"greedy": 1.0}, "output_tokens": Lengths(DELTAS, DELTAS), **changes})


def load(api: ScriptedApi, work: Workload, timeout_s: float = HANG_S, **server: Any) -> LoadRun:
    given = {"dialect": REALIZAR, "url": api.url, **server}
    return Generators(1).run(Server("it", model="scripted-1b", **given), work, timeout_s)


def good(run: LoadRun) -> list[Answer]:
    """The answers that came whole, in the order in which they were due."""
    return sorted((each for each in run.answers if each.is_whole), key=lambda each: each.due_s)


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_the_servers(api: ScriptedApi, chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends a piece once the one before has been seen: so each is timed before the next is sent."""
    seen: list[threading.Event] = []

    def one_by_one(body: dict[str, Any]) -> Script:
        seen[:] = [threading.Event() for _ in range(DELTAS)]
        deltas = words("a" * 4 * DELTAS).deltas
        return Script([replace(delta, after=event) for delta, event in zip(deltas, [None, *seen], strict=False)])

    on_body = client._Exchange.on_body

    def note(self: client._Exchange, body: bytes) -> None:
        on_body(self, body)
        for event in seen[: len(self.deltas_s)]:
            event.set()

    monkeypatch.setattr(client._Exchange, "on_body", note)
    api.script = one_by_one
    run = load(api, work(num_requests=3, concurrency=1, chat=chat))
    assert len(good(run)) == 3
    for answered, span in zip(good(run), api.spans, strict=True):
        assert answered.output_tokens == len(answered.deltas_s) == len(span.deltas_s) == DELTAS
        assert answered.prompt_tokens == 7, "as the server counts"
        moments = [answered.due_s, answered.sent_s, span.begun_s]
        moments += itertools.chain.from_iterable(zip(span.deltas_s, answered.deltas_s, strict=True))
        moments.append(answered.ended_s)
        assert moments == sorted(moments)
        assert answered.ttft_s == answered.deltas_s[0] - answered.due_s
        assert sum(answered.gaps_s) == pytest.approx(answered.tpot_s * (DELTAS - 1))


def test_what_is_sent(api: ScriptedApi) -> None:
    load(api, work(num_requests=1))
    load(api, work(num_requests=1, chat=True), api_key="k")
    completion, chat = api.requests
    assert len(completion["prompt"].split()) == 5
    assert completion["max_tokens"] == DELTAS
    assert completion["ignore_eos"] is True
    assert chat["messages"] == [{"role": "user", "content": completion["prompt"]}], "the same seed, the same prompt"
    assert {body["model"] for body in api.requests} == {"scripted-1b"}
    assert all(body["stream"] for body in api.requests)


def test_open_loop_does_not_wait_for_answers(api: ScriptedApi) -> None:
    """Requests are sent when they are due, though none is answered before all have come."""
    all_came = threading.Event()

    def script(body: dict[str, Any]) -> Script:
        if len(api.requests) == 20:
            all_came.set()
        return held("", "abc", all_came)

    api.script = script
    poisson = work(num_requests=20, concurrency=None, rate_per_s=200.0)
    run = load(api, poisson)
    assert len(good(run)) == 20
    assert max(a.sent_s for a in run.answers) < min(a.deltas_s[0] for a in run.answers)
    rng, due_s = random.Random(poisson.seed), [run.start_s]
    for _ in range(19):
        due_s.append(due_s[-1] + rng.expovariate(200.0))
    assert [a.due_s for a in good(run)] == pytest.approx(due_s)
    assert all(a.sent_s >= a.due_s for a in run.answers)


def test_arrivals_are_a_poisson_process(api: ScriptedApi) -> None:
    """Exponential gaps: as wide as their mean."""
    run = load(api, work(num_requests=400, concurrency=None, rate_per_s=2000.0, output_tokens=Lengths(1, 1)))
    gaps = np.diff([each.due_s for each in good(run)])
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 2000, rel=0.15)
    assert gaps.std() == pytest.approx(1 / 2000, rel=0.25)


def test_what_has_arrived_waits_for_another_to_end(api: ScriptedApi) -> None:
    """With a rate and a limit of open requests, and with all arriving at once: the wait is none of the server's."""
    for rate_per_s in (500.0, None):
        api.spans.clear()
        run = load(api, work(num_requests=12, concurrency=2, rate_per_s=rate_per_s))
        assert most_open(api) <= 2
        assert all(each.due_s >= run.start_s for each in good(run))
        ends = sorted(each.ended_s for each in good(run))
        assert all(each.due_s >= ends[place] for place, each in enumerate(good(run)[2:]))


def test_closed_loop_keeps_so_many_open(api: ScriptedApi) -> None:
    three = threading.Event()

    def script(body: dict[str, Any]) -> Script:
        if len(api.requests) == 3:
            three.set()
        return held("", "abcd" * 2, three)

    api.script = script
    load(api, work(num_requests=12, concurrency=3))
    assert most_open(api) == 3


def most_open(api: ScriptedApi) -> int:
    """Answers that were open at a time, as the server saw them."""
    events = sorted([(span.begun_s, 1) for span in api.spans] + [(span.ended_s or 0, -1) for span in api.spans])
    return max(itertools.accumulate(change for _, change in events))


def test_failures_are_reported_and_not_timed(api: ScriptedApi) -> None:
    scripts = {
        "refused": Script(status=429, error="full"),
        "dies": Script([Delta({"content": "a"})], error="engine died"),
        "breaks": Script([Delta({"content": "a"})], whole=False),
        "empty": Script(),
    }
    for name, script in scripts.items():
        api.script = lambda body, script=script: script
        run = load(api, work(num_requests=2))
        assert good(run) == []
        messages = {"refused": "status 429", "dies": "engine died", "breaks": "broke off", "empty": "no text"}
        assert all(messages[name] in str(answered.error) for answered in run.answers)


def test_slow_and_absent_servers(api: ScriptedApi) -> None:
    api.script = lambda body: held("")
    run = load(api, work(), timeout_s=0.3)
    assert {answered.error for answered in run.answers} == {"no whole answer within 0.3 s"}
    gone = load(api, work(), url="http://127.0.0.1:9")
    assert all("127.0.0.1:9" in str(answered.error) for answered in gone.answers)
    for url in ("ftp://x", "localhost:8000", "http://a:b", ""):
        with pytest.raises(InvalidRequestError):
            load(api, work(num_requests=1), url=url)


def compare(*servers: Server, rounds: int = 1, warmup: int = 0, log: Any = str) -> list[ServerRuns]:
    loads = {"plain": work()}
    given: dict[str, Any] = {"rounds": rounds, "warmup": warmup, "timeout_s": HANG_S, "log": log}
    with Generators(1) as generators:
        return compare_servers(servers, loads, generators, **given)


def test_servers_in_turn(api: ScriptedApi) -> None:
    """Both get the same requests; warming up is not counted; a server that does not know `ignore_eos` is spared it."""

    def strict(body: dict[str, Any]) -> Script:
        return Script(status=400, error="unknown field ignore_eos") if "ignore_eos" in body else words("abcd")

    reported: list[str] = []
    with ScriptedApi(script=strict) as other:
        api.script = lambda body: words("abcd")
        servers = [Server(name, url, "m", dialect=OPENAI) for name, url in (("a", api.url), ("b", other.url))]
        results = compare(*servers, rounds=2, warmup=1, log=reported.append)
        asked = [sorted(body["prompt"] for body in server.requests[-16:]) for server in (api, other)]
    assert [[len(good(run)) for run in result.runs["plain"]] for result in results] == [[8, 8]] * 2
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 16, "every round has prompts of its own: a cache must not help the second"
    assert (len(api.requests), len(other.requests)) == (17, 18)
    assert all("ignore_eos" in body for body in api.requests)
    assert sum("does not know ignore_eos" in text for text in reported) == 1
    assert [text.split(": ")[1].split(",")[0] for text in reported if text.startswith("round")] == ["a", "b", "a", "b"]


def test_a_server_that_refuses_the_first_request(api: ScriptedApi) -> None:
    api.script = lambda body: Script(status=404, error="no such model")
    with pytest.raises(InvalidRequestError, match="no such model"):
        compare(Server("a", api.url, "m"))


def test_warming_up(api: ScriptedApi) -> None:
    """A short request of each kind, then others as long as those that are measured, with other prompts."""
    api.script = lambda body: words("abcd")
    compare(Server("a", api.url, "m"), warmup=4)
    assert [len(body["prompt"].split()) for body in api.requests[:5]] == [4, 5, 5, 5, 5]
    assert len(api.requests) == 4 + 8
    assert len({body["prompt"] for body in api.requests}) == 12
    assert {body["max_tokens"] for body in api.requests[:4]} == {4}


def test_first_model(api: ScriptedApi) -> None:
    for url in (api.url, f"{api.url}/v1/"):
        found = find_server(Server("a", url, ""))
        assert (found.model, found.dialect, found.context_tokens) == ("scripted-1b", REALIZAR, 4096)
    api.key = "k"
    assert find_server(Server("a", api.url, "", "k")).model == "scripted-1b"
    with pytest.raises(HubError, match="401"):
        find_server(Server("a", api.url, ""))
    named = Server("a", api.url, "its-name", context_tokens=100)
    assert find_server(named) == named, "a server that lists no models can be loaded by a model's name"


def test_cuts_between_bytes_do_not_matter(api: ScriptedApi) -> None:
    """A piece holds letters of several bytes, quotes and line ends; it counts once however it is cut."""
    text = json.dumps({"é": "\n\n data: x"})
    api.script = lambda body: Script([Delta({"content": text})] * 50)
    (answered,) = good(load(api, work(num_requests=1)))
    assert len(answered.deltas_s) == 50


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("127.0.0.1:8000", InvalidRequestError, "http://"),
        ("ftp://127.0.0.1", InvalidRequestError, "http://"),
        ("http://127.0.0.1:9", HubError, "^http://127.0.0.1:9 does not answer: Connection refused$"),
    ],
)
def test_addresses_without_a_server(url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_server(Server("a", url, ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--timeout-s", "0"), "timeout-s"), (("--json", "nonesuch/a.json"), "nonesuch"), (("--picture", "no/a"), "no/a")],
)
def test_what_can_not_end_well_is_refused_before_the_load(
    api: ScriptedApi, capsys: pytest.CaptureFixture[str], words: tuple[str, str], message: str
) -> None:
    assert run_app(app, ["bench-serve", "--url", api.url, "--requests", "1", *words]) == 1
    assert message in capsys.readouterr().err
    assert api.requests == []

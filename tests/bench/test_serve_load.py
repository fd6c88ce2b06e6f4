"""bench-serve's load against a server that notes when it sends what."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from realizar.bench import serve_client
from realizar.bench.serve_client import Target
from realizar.bench.serve_compare import compare_servers, first_model
from realizar.bench.serve_run import LoadRun, run_load
from realizar.bench.serve_workload import Lengths, Workload, plan_requests
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
    given: dict[str, Any] = {"num_requests": 8, "concurrency": 8, "prompt_words": Lengths(5, 5)}
    return Workload(**{**given, "output_tokens": Lengths(DELTAS, DELTAS), **changes})


def load(api: ScriptedApi, load: Workload, **target: Any) -> LoadRun:
    return run_load(Target("it", api.url, "scripted-1b", **target), plan_requests(load), load)


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_the_servers(api: ScriptedApi, chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sends a piece once the one before has been seen: so each is timed before the next is sent."""
    seen: list[threading.Event] = []

    def one_by_one(body: dict[str, Any]) -> Script:
        seen[:] = [threading.Event() for _ in range(DELTAS)]
        deltas = words("a" * 4 * DELTAS).deltas
        return Script([replace(delta, after=event) for delta, event in zip(deltas, [None, *seen], strict=False)])

    on_body = serve_client._Exchange.on_body

    def note(self: serve_client._Exchange, body: bytes) -> None:
        on_body(self, body)
        for event in seen[: len(self.deltas_s)]:
            event.set()

    monkeypatch.setattr(serve_client._Exchange, "on_body", note)
    api.script = one_by_one
    run = load(api, work(num_requests=3, concurrency=1), chat=chat)
    assert len(run.good) == 3
    for answered, span in zip(run.good, api.spans, strict=True):
        assert answered.output_tokens == len(answered.deltas_s) == len(span.deltas_s) == DELTAS
        assert answered.prompt_tokens == 7, "as the server counts"
        moments = [answered.due_s, answered.sent_s, span.begun_s]
        moments += itertools.chain.from_iterable(zip(span.deltas_s, answered.deltas_s, strict=True))
        moments.append(answered.ended_s)
        assert moments == sorted(moments)
        assert answered.ttft_s == answered.deltas_s[0] - answered.due_s
        assert sum(answered.gaps_s) == pytest.approx(answered.tpot_s * (DELTAS - 1))


def test_what_is_sent(api: ScriptedApi) -> None:
    load(api, work(num_requests=1), extra={"ignore_eos": True})
    load(api, work(num_requests=1), chat=True, api_key="k")
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
    assert len(run.good) == 20
    assert max(a.sent_s for a in run.answered) < min(a.deltas_s[0] for a in run.answered)
    planned = [request.arrival_s for request in plan_requests(poisson)]
    assert [a.due_s - run.answered[0].due_s for a in run.answered] == pytest.approx([p - planned[0] for p in planned])
    assert all(a.sent_s >= a.due_s for a in run.answered)


def test_closed_loop_keeps_so_many_open(api: ScriptedApi) -> None:
    three = threading.Event()

    def script(body: dict[str, Any]) -> Script:
        if len(api.requests) == 3:
            three.set()
        return held("", "abcd" * 2, three)

    api.script = script
    load(api, work(num_requests=12, concurrency=3))
    events = sorted([(span.begun_s, 1) for span in api.spans] + [(span.ended_s or 0, -1) for span in api.spans])
    assert max(itertools.accumulate(change for _, change in events)) == 3


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
        assert run.good == []
        messages = {"refused": "status 429", "dies": "engine died", "breaks": "broke off", "empty": "no text"}
        assert all(messages[name] in str(answered.error) for answered in run.answered)


def test_slow_and_absent_servers(api: ScriptedApi) -> None:
    api.script = lambda body: held("")
    target = Target("it", api.url, "m")
    run = run_load(target, plan_requests(work()), work(), timeout_s=0.3)
    assert {answered.error for answered in run.answered} == {"no whole answer within 0.3 s"}
    gone = run_load(replace(target, url="http://127.0.0.1:9"), plan_requests(work()), work())
    assert all("127.0.0.1:9" in str(answered.error) for answered in gone.answered)
    for url in ("ftp://x", "localhost:8000", "http://a:b", ""):
        with pytest.raises(InvalidRequestError):
            run_load(replace(target, url=url), plan_requests(work(num_requests=1)), work(num_requests=1))


def test_servers_in_turn(api: ScriptedApi) -> None:
    """Both get the same requests; warming up is not counted; a server that does not know `ignore_eos` is spared it."""

    def strict(body: dict[str, Any]) -> Script:
        return Script(status=400, error="unknown field ignore_eos") if "ignore_eos" in body else words("abcd")

    reported: list[str] = []
    with ScriptedApi(script=strict) as other:
        api.script = lambda body: words("abcd")
        targets = [
            Target(name, url, "m", extra={"ignore_eos": True}) for name, url in (("a", api.url), ("b", other.url))
        ]
        runs = compare_servers(targets, work(), rounds=2, warmup=1, timeout_s=HANG_S, log=reported.append)
        asked = [sorted(body["prompt"] for body in server.requests[-16:]) for server in (api, other)]
    assert [len(run.good) for run in runs] == [16, 16]
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 16, "every round has prompts of its own: a cache must not help the second"
    assert (len(api.requests), len(other.requests)) == (17, 18)
    assert all("ignore_eos" in body for body in api.requests)
    assert sum("does not know ignore_eos" in text for text in reported) == 1
    assert [text.split(": ")[1].split(",")[0] for text in reported if text.startswith("round")] == ["a", "b", "a", "b"]


def test_a_server_that_refuses_the_first_request(api: ScriptedApi) -> None:
    api.script = lambda body: Script(status=404, error="no such model")
    with pytest.raises(InvalidRequestError, match="no such model"):
        compare_servers([Target("a", api.url, "m")], work(), rounds=1, warmup=0, timeout_s=HANG_S, log=str)


def test_first_model(api: ScriptedApi) -> None:
    assert first_model(api.url, None) == first_model(f"{api.url}/v1/", None) == "scripted-1b"
    api.key = "k"
    assert first_model(api.url, "k") == "scripted-1b"
    with pytest.raises(HubError, match="401"):
        first_model(api.url, None)


def test_cuts_between_bytes_do_not_matter(api: ScriptedApi) -> None:
    """A piece holds letters of several bytes, quotes and line ends; it counts once however it is cut."""
    text = json.dumps({"é": "\n\n data: x"})
    api.script = lambda body: Script([Delta({"content": text})] * 50)
    (answered,) = load(api, work(num_requests=1)).good
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
        first_model(url, None)


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

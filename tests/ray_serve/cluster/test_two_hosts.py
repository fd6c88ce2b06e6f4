"""SmolLM2 on a cluster of two hosts: the API's tests pass, engines follow the load, and a host may die."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

pytest.importorskip("ray.serve")

from ray_serve.cluster.conftest import RUNNING, TwoHosts
from realizar.bench.serve.servers import ServerState
from server_thread import NAME
from waits import HANG_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[3]
SUITE = (
    *("chat", "completions", "continued_json", "embeddings", "many", "prompt_progress", "tokenizer_routes", "tools"),
)
LONG = 300


@dataclass
class Answer:
    """The end of one stream. Attributes: ended_s: of `time.monotonic`."""

    num_tokens: int = 0
    errors: int = 0
    ended_s: float = 0.0


def client(hosts: TwoHosts) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hosts.url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def stream(api: openai.OpenAI, prompt: str, max_tokens: int) -> Answer:
    """Read a stream to its end, or to its error."""
    answer = Answer()
    try:
        for event in api.completions.create(
            model=NAME, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        ):
            answer.num_tokens += bool(event.choices)
    except openai.APIError:
        answer.errors += 1
    answer.ended_s = time.monotonic()
    return answer


def wait_until(true: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < until_s, what
        time.sleep(0.25)


def running(hosts: TwoHosts) -> list[tuple[int, int]]:
    return sorted((stats.num_running, stats.num_waiting) for stats in hosts.engines())


@pytest.mark.parametrize("hosts", [{"min_replicas": 2, "max_replicas": 2}], indirect=True)
def test_the_openai_client_finds_the_same_api(hosts: TwoHosts) -> None:
    tests = [f"tests/server/openai/test_{name}.py" for name in SUITE]
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--server-url", hosts.url, *tests)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    wait_until(lambda: sum(stats.generation_tokens > 0 for stats in hosts.engines()) == 2, "both engines had requests")
    wait_until(
        lambda: len(ServerState.parse(httpx.get(f"{hosts.url}/metrics", timeout=60).text).replicas) == 2,
        "each has its own figures",
    )


@pytest.mark.parametrize(
    "hosts",
    [{"max_replicas": 3, "target_requests": RUNNING, "upscale_delay_s": 1.0, "downscale_delay_s": 2.0}],
    indirect=True,
)
def test_engines_follow_the_load_and_no_request_fails(hosts: TwoHosts) -> None:
    api, easing, stopping = client(hosts), threading.Event(), threading.Event()

    def load(number: int) -> list[Answer]:
        answers = []
        while not (stopping if number == 0 else easing).is_set():
            answers.append(stream(api, f"Story {number}, part {len(answers)}: once upon a time", 40))
        return answers

    assert hosts.num_engines() == 1
    with ThreadPoolExecutor(4 * RUNNING) as threads:
        loads = [threads.submit(load, number) for number in range(4 * RUNNING)]
        try:
            wait_until(lambda: hosts.num_engines() == 3, "three engines run")
            wait_until(lambda: min(running(hosts))[0] > 0, "each of them has requests")
            easing.set()
            wait_until(lambda: hosts.num_engines() == 1, "one engine is left, for the one client that goes on")
        finally:
            easing.set()
            stopping.set()
    answers = [answer for each in loads for answer in each.result()]
    assert not [answer for answer in answers if answer.errors]
    assert all(answer.num_tokens for answer in answers)
    assert stream(api, "Once upon a time", 4).errors == 0


@pytest.mark.parametrize("hosts", [{"min_replicas": 2, "max_replicas": 2}], indirect=True)
def test_a_host_that_dies_takes_its_running_requests_alone(hosts: TwoHosts) -> None:
    api, count = client(hosts), 3 * RUNNING
    with ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(stream, api, f"Number {number} {'word ' * number}", LONG) for number in range(count)]
        wait_until(lambda: running(hosts) == [(RUNNING, 2), (RUNNING, 2)], "both run all they can")
        killed_s = time.monotonic()
        hosts.kill_other()
        ends = [answer.result() for answer in answers]
    failed = [end for end in ends if end.errors]
    late = [round(end.ended_s - killed_s, 2) for end in failed]
    assert len(failed) == RUNNING, late
    assert all(end.num_tokens for end in ends if not end.errors)
    assert_all_end_well(hosts, api, range(4))
    hosts.add_other()
    wait_until(lambda: hosts.num_engines() == 2, "the engine is back on another host")
    assert_all_end_well(hosts, api, range(4))


def assert_all_end_well(hosts: TwoHosts, api: openai.OpenAI, numbers: Sequence[int]) -> None:
    with ThreadPoolExecutor(len(numbers)) as threads:
        ends = list(threads.map(lambda number: stream(api, f"Then {number}", 8), numbers))
    assert not [end for end in ends if end.errors]

"""`realizar serve --api-processes 2`: one server to its users, whichever process answers them, and whichever dies."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from engine.process.served import (
    LONG,
    SHORT,
    Served,
    Stream,
    bare_request,
    figure,
    is_ready,
    serving,
    short_text,
)
from waits import HANG_S, child_commands, is_alive, wait_until

KEY = "a-key-of-two-processes"
CLEARS = ("--allow-cache-clearing",)


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as it was: 4 run, 4 wait."""
    hold = tmp_path_factory.mktemp("hold")
    with serving(tiny, "--max-running", "4", "--max-queued", "4", "--api-processes", "2", *CLEARS, hold=hold) as served:
        served.wait_ready()
        wait_until(lambda: len(api_pids(served)) == 2)
        yield served


def api_pids(served: Served) -> list[int]:
    return [pid for pid, command in child_commands(served.process.pid).items() if b"api_process" in command]


def engine_pid(served: Served) -> int:
    (pid,) = (pid for pid, command in child_commands(served.process.pid).items() if b"api_process" not in command)
    return pid


def num_tcp_sockets(pid: int, port: int) -> int:
    """Connections of a process to the server's port."""
    table = Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    inodes = {f"socket:[{line.split()[9]}]" for line in table if line.split()[1].endswith(f":{port:04X}")}
    found = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(descriptor.readlink()) in inodes
        except FileNotFoundError:
            continue
    return found


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def both_answer(served: Served, url: str) -> bool:
    with ExitStack() as stack:
        for client in [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(2)]:
            client.get("/health")
        pids = api_pids(served)
        return len(pids) == 2 and all(num_tcp_sockets(pid, port_of(url)) for pid in pids)


def test_both_processes_answer_alike_and_count_together(server: Served) -> None:
    url = server.wait_ready()
    wait_until(lambda: both_answer(server, url))  # the model may be there before a process has imported what it needs
    before = figure(url, "generation_tokens_total"), sum(finished(url).values())
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(4)]
        bodies = [client.post("/v1/completions", json=SHORT).json() for client in clients]
        assert len({body["choices"][0]["text"] for body in bodies}) == 1
        assert len({str(client.get("/v1/models").json()) for client in clients}) == 1
        shares = [num_tcp_sockets(pid, port_of(url)) for pid in api_pids(server)]
        assert all(shares)
        for client in clients:
            text = client.get("/metrics").text
            assert f'realizar:generation_tokens_total{{model_name="tiny"}} {before[0] + 64}' in text
            assert sum(finished(url, text).values()) == before[1] + 4
            assert client.get("/health").json() == client.get("/ready").json() | {"status": "ok"}


def test_either_process_clears_the_cache_of_both(server: Served) -> None:
    """The engine is in neither of them."""
    url = server.wait_ready()
    body = {**SHORT, "prompt": "Once upon a time there was a cache. " * 12, "max_tokens": 1}

    def cached(client: httpx.Client) -> int:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(4)]
        assert all([cached(client) for client in clients][1:])
        for client in clients:
            assert client.post("/reset_prefix_cache").json() == {"models": ["tiny"]}
            assert [cached(each) > 0 for each in (client, *clients)] == [False, True, True, True, True]


def finished(url: str, text: str | None = None) -> Counter[str]:
    """Choices that ended, by reason."""
    text = text or httpx.get(f"{url}/metrics", timeout=HANG_S).text
    found = re.findall(r'^realizar:request_success_total\{finished_reason="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return Counter({reason: round(float(value)) for reason, value in found})


def test_the_queue_is_one(server: Served) -> None:
    """Eight answers run or wait, four in each process; a ninth is refused, whichever process it comes to."""
    url = server.wait_ready()
    with server.held_steps():
        streams = [Stream(url) for _ in range(8)]
        wait_until(lambda: figure(url, "num_requests_running") + figure(url, "num_requests_waiting") == 8)
        refused = [httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S) for _ in range(4)]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in refused] == [
            (429, "rate_limit_exceeded")
        ] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    for stream in streams:
        stream.join()
    assert {(stream.finish, stream.error) for stream in streams} == {("length", None)}


def test_stop_strings_logprobs_and_clients_that_leave(server: Served) -> None:
    url = server.wait_ready()
    whole = short_text(url)
    stop = whole[4:6]
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(2)]
        for client in clients:
            body = client.post("/v1/completions", json={**SHORT, "stop": [stop], "n": 2, "logprobs": 2}).json()
            for choice in body["choices"]:
                assert (choice["text"], choice["stop_reason"]) == (whole[: whole.index(stop)], stop)
                assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])
    with server.held_steps(), ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(bare_request(url, first_delta=True))
        wait_until(lambda: figure(url, "num_requests_running") == 4)
        stack.close()
        wait_until(lambda: figure(url, "num_requests_running") == 0)
    assert short_text(url) == whole


def test_a_process_that_dies_costs_its_own_connections_and_is_replaced(server: Served) -> None:
    url = server.wait_ready()
    before, done = short_text(url), finished(url)
    pids = api_pids(server)
    with server.held_steps():
        streams = [Stream(url) for _ in range(4)]
        for stream in streams:
            stream.wait_begun()
        wait_until(lambda: sum(num_tcp_sockets(pid, port_of(url)) for pid in pids) == len(streams))
        num_broken = num_tcp_sockets(pids[0], port_of(url))
        assert 0 < num_broken < len(streams)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: sum(not stream.is_open for stream in streams) == num_broken)
        assert short_text_while_held(url)  # the other process takes all that comes
        wait_until(lambda: figure(url, "num_requests_running") == len(streams) - num_broken)
    for stream in streams:
        stream.join()
    assert [stream.finish for stream in streams].count("length") == len(streams) - num_broken
    assert all("broken off" in str(stream.error) for stream in streams if stream.finish is None)
    wait_until(lambda: len(set(api_pids(server)) - {pids[0]}) == 2)
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(6)]
        for client in clients:
            assert client.get("/ready").status_code == 200
        wait_until(lambda: all(num_tcp_sockets(pid, port_of(url)) for pid in api_pids(server)) or refresh(clients))
        assert all(
            client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"] == before for client in clients
        )
    assert not finished(url) - done - Counter({"length": 20, "stop": 20})
    assert finished(url)["length"] >= done["length"]  # what the dead process had counted stays
    server.wait_line(r"ERROR an API process was killed by SIGKILL; another one is started in 0.25 s")


def test_a_process_that_hangs_is_replaced(server: Served) -> None:
    url = server.wait_ready()
    wait_until(lambda: len(api_pids(server)) == 2)
    before, (hung, other) = short_text(url), api_pids(server)
    os.kill(hung, signal.SIGSTOP)
    server.wait_line(r"ERROR an API process was stopped; another one is started in [0-9.]+ s")
    wait_until(lambda: len(set(api_pids(server)) - {hung, other}) == 1 and not is_alive(hung))
    assert {short_text(url) for _ in range(4)} == {before}


def refresh(clients: list[httpx.Client]) -> bool:
    """Have all clients connect anew; false, so that a wait goes on."""
    for client in clients:
        client.get("/ready", headers={"connection": "close"})
    for client in clients:
        client.get("/ready")
    return False


def short_text_while_held(url: str) -> bool:
    answer = httpx.post(f"{url}/v1/completions", json={**SHORT, "max_tokens": 1}, timeout=HANG_S)
    return answer.status_code == 200


def test_a_killed_engine_fails_the_requests_of_all_processes(server: Served) -> None:
    url = server.wait_ready()
    before, tokens = short_text(url), figure(url, "generation_tokens_total")
    with server.held_steps():
        streams = [Stream(url) for _ in range(4)]
        for stream in streams:
            stream.wait_begun()
        os.kill(engine_pid(server), signal.SIGKILL)
        for stream in streams:
            stream.join()
    assert all("engine stopped" in str(stream.error) and stream.finish is None for stream in streams)
    wait_until(lambda: is_ready(url))
    wait_until(lambda: all(is_ready(url) for _ in range(4)))
    assert {short_text(url) for _ in range(4)} == {before}
    assert figure(url, "engine_restarts_total") == 1
    assert figure(url, "generation_tokens_total") >= tokens


def test_it_drains_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, "--api-processes", "3", hold=tmp_path) as served:
        url = served.wait_ready()
        wait_until(lambda: len(api_pids(served)) == 3)
        children = list(child_commands(served.process.pid))
        assert len(children) == 4
        with served.held_steps():
            streams = [Stream(url) for _ in range(3)]
            for stream in streams:
                stream.wait_begun()
            served.process.send_signal(signal.SIGTERM)
            served.wait_line(r"shuts down when the open requests have ended \(3\)")
            wait_until(lambda: httpx.get(f"{url}/ready", timeout=HANG_S).json() == {"status": "draining"})
            refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=HANG_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        for stream in streams:
            stream.join()
        assert {(stream.finish, stream.error) for stream in streams} == {("length", None)}
        assert served.wait_exit() == 0
        wait_until(lambda: not any(map(is_alive, children)))


@pytest.mark.parametrize("kill_main", [False, True], ids=["ctrl-c twice", "main process killed"])
def test_an_end_at_once_leaves_nothing(tiny: Path, tmp_path: Path, kill_main: bool) -> None:
    with serving(tiny, "--api-processes", "2", hold=tmp_path) as served, served.held_steps():
        url = served.wait_ready()
        wait_until(lambda: len(api_pids(served)) == 2)
        children = list(child_commands(served.process.pid))
        stream = Stream(url)
        stream.wait_begun()
        if kill_main:
            served.process.kill()
            served.wait_exit()
        else:
            served.process.send_signal(signal.SIGINT)
            served.wait_line("shuts down when")
            served.process.send_signal(signal.SIGINT)
            assert served.wait_exit() == 130
        wait_until(lambda: not any(map(is_alive, children)))
        stream.join()
        assert stream.finish is None


def test_limits_keys_and_refusals_hold_in_every_process(tiny: Path, tmp_path: Path) -> None:
    """Connections are as many as one process allows; its memory and the others' are shares of one."""
    keys = tmp_path / "keys"
    keys.write_text(KEY, encoding="ascii")
    keys.chmod(0o600)
    limits = ("--max-connections", "5", "--request-memory", "400K", "--max-body-bytes", "300K")
    with serving(tiny, "--api-processes", "2", "--api-key-file", keys, *limits, hold=tmp_path) as served:
        url = served.wait_ready()
        wait_until(lambda: len(api_pids(served)) == 2)
        head = {"authorization": f"Bearer {KEY}"}
        cases: list[tuple[dict[str, object], int]] = [
            ({"headers": head, "json": SHORT}, 200),
            ({"json": SHORT}, 401),
            ({"headers": {**head, "host": "evil.example"}, "json": SHORT}, 403),
            ({"headers": {**head, "origin": "http://evil.example"}, "json": SHORT}, 403),
            ({"headers": head, "content": b"{}"}, 415),
            ({"headers": head, "json": {**SHORT, "nonsense": 1}}, 400),
            ({"headers": {**head, "x": "y" * 70_000}, "json": SHORT}, 431),
            ({"headers": head, "json": {**SHORT, "prompt": "x" * 310_000}}, 413),  # the body
            ({"headers": head, "json": {**SHORT, "prompt": "x" * 150_000}}, 413),  # half of a process's 200 KB
            ({"headers": head, "json": {**SHORT, "prompt": "x" * 50_000}}, 400),  # read, and longer than the context
        ]
        for fields, status in cases:
            with ExitStack() as stack:  # two connections at a time, one in each process
                clients = [stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S)) for _ in range(2)]
                for client in clients:
                    client.get("/health")
                got = [client.post("/v1/completions", **fields).status_code for client in clients]  # type: ignore[arg-type]
                assert got == [status] * 2, fields
            wait_until(lambda: all(num_tcp_sockets(pid, port_of(url)) == 0 for pid in api_pids(served)))
        assert httpx.get(f"{url}/metrics", timeout=HANG_S).status_code == 401
        _fill_connections(served, url, head)


def _fill_connections(served: Served, url: str, head: dict[str, str]) -> None:
    with served.held_steps(), ExitStack() as stack:
        num_open = 0
        while num_open < 5:  # a connection that was closed a moment ago may count yet
            client = stack.enter_context(httpx.Client(base_url=url, timeout=HANG_S))
            stream = stack.enter_context(client.stream("POST", "/v1/completions", json=LONG, headers=head))
            assert stream.status_code in (200, 503)
            num_open += stream.status_code == 200
        wait_until(lambda: sum(num_tcp_sockets(pid, port_of(url)) for pid in api_pids(served)) == 5)
        assert sorted(num_tcp_sockets(pid, port_of(url)) for pid in api_pids(served)) == [2, 3]
        refused = httpx.get(f"{url}/health", timeout=HANG_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
    wait_until(lambda: httpx.get(f"{url}/health", timeout=HANG_S).status_code == 200)


def test_what_can_not_be_is_refused_by_name(tiny: Path, refusal: Callable[..., str]) -> None:
    for words, said in (
        (("--api-processes", "0"), "--api-processes must be between 1 and 64, not 0"),
        (("--api-processes", "65"), "--api-processes must be between 1 and 64, not 65"),
        (("--api-processes", "4", "--max-connections", "3"), "4 API processes need as many connections"),
    ):
        assert said in refusal(tiny, *words)

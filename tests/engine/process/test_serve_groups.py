"""`realizar serve --replicas 2 --tensor-parallel 2`: a process that dies costs the replica that it is of alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from engine.process.served import Served, Stream, figure, num_ready, of_replicas, serving, short_text
from realizar import LLM, SamplingParams
from waits import child_commands, child_pids, is_alive, wait_until

GROUPS = ("--replicas", "2", "--tensor-parallel", "2", "--max-running", "2", "--context-length", "512")
# One core for each replica would do, but not as many threads as processes.
ON_CPU = ("--device", "cpu", "--threads", "2")


def processes_of(served: Served) -> dict[int, int]:
    """Each engine's process, with its second rank."""
    engines = [pid for pid, command in child_commands(served.process.pid).items() if b"api_process" not in command]
    return {engine: next(iter(child_pids(engine)), 0) for engine in engines}


def prompt_of(number: int) -> list[int]:
    return [20 + number] * 40


def texts(url: str) -> list[str]:
    return [short_text(url, prompt=prompt_of(number)) for number in range(4)]


def texts_of_one_process(tiny: Path) -> list[str]:
    with LLM(tiny, device="cpu", threads=1, context_length=512) as llm:
        how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        answers = llm.generate([prompt_of(number) for number in range(4)], how)
    return [answer.outputs[0].text for answer in answers]


def test_a_killed_rank_costs_the_running_requests_of_its_replica_alone(tiny: Path, tmp_path: Path) -> None:
    whole = texts_of_one_process(tiny)
    with serving(tiny, *GROUPS, *ON_CPU, hold=tmp_path) as served:
        url = served.wait_ready()
        before = processes_of(served)
        assert len({*before, *before.values()} - {0}) == 4
        for engine, rank in before.items():
            assert os.sched_getaffinity(rank) == os.sched_getaffinity(engine)
        assert texts(url) == whole
        assert all(of_replicas(url, "prompt_tokens_total").values())
        with served.held_steps():
            running = [Stream(url, prompt=prompt_of(8 + number)) for number in range(4)]
            for stream in running:
                stream.wait_begun()
            assert of_replicas(url, "requests") == {"0": 2, "1": 2}
            queued = [Stream(url, prompt=prompt_of(12 + number)) for number in range(4)]
            wait_until(lambda: of_replicas(url, "requests") == {"0": 4, "1": 4})
            hit = min(before)
            os.kill(before[hit], signal.SIGKILL)
            wait_until(lambda: sum(not stream.is_open for stream in running) == 2)
        for stream in (*running, *queued):
            stream.join()
        assert sorted(str(stream.finish) for stream in running) == ["None", "None", "length", "length"]
        assert all("engine stopped" in str(stream.error) for stream in running if stream.finish is None)
        assert {(stream.finish, stream.error) for stream in queued} == {("length", None)}
        assert figure(url, "replica_moved_requests_total") == 2
        wait_until(lambda: num_ready(url) == 2)
        after = processes_of(served)
        assert {*before.items()} & {*after.items()} == {(pid, rank) for pid, rank in before.items() if pid != hit}
        assert len({*after, *after.values()} - {0}) == 4
        assert not is_alive(hit)
        assert not is_alive(before[hit])
        assert texts(url) == whole
        served.wait_line(r"replica \d: .*rank 1 of 2 \(process \d+\) was killed by SIGKILL")

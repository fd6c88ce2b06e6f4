"""Processes of grammars that crash, hang, are killed or cancelled: what that costs, and whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realizar.errors import EngineDeadError, InvalidRequestError, QueueFullError, RealizarError
from realizar.sampling_params import StructuredKind, StructuredOutput
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.structured.workers import service as services
from realizar.structured.workers import worker as handles
from realizar.structured.workers.grammar_rows import GrammarRow
from realizar.structured.workers.messages import FromWorker
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import Worker, WorkerLimits
from structured.grammar_followers import (
    BYTES,
    DIGITS,
    ENDLESS,
    LETTERS,
    PATIENT,
    VOCAB_SIZE,
    Follower,
    make_service,
    served_masks,
    step,
)
from structured.grammar_walks import CONTROL, END, TOKENS, allowed_ids
from waits import HANG_S, is_alive, process, wait_until

MOST = 2**63
_CRASHES = {"enum": [0, -MOST]}  # a segmentation fault in llguidance 1.9
HOSTILE: dict[str, tuple[StructuredKind, str]] = {
    "const": ("json_schema", json.dumps({"const": -MOST})),
    "enum": ("json_schema", json.dumps({"enum": [1, -MOST]})),
    "enum in a property": ("json_schema", json.dumps({"properties": {"a": {"enum": [-MOST]}}, "required": ["a"]})),
    "const in a list": ("json_schema", json.dumps({"const": [{"a": -MOST + 1}]})),
    "a tool's arguments": ("lark", f'start: "<call>" %json {json.dumps(_CRASHES)}'),
    "several tools": ("lark", f"start: %json {{}} | %json {json.dumps({'items': _CRASHES, **_CRASHES})}"),
    "bounds": ("json_schema", json.dumps({"type": "integer", "minimum": -MOST, "maximum": -MOST + 5})),
    "bounds of numbers": ("json_schema", json.dumps({"type": "number", "minimum": -MOST, "maximum": MOST})),
    "allOf": ("json_schema", json.dumps({"format": "email", "pattern": "a", "allOf": 5})),
    "huge minimum": ("json_schema", json.dumps({"minimum": 10**400, "maximum": 1.5})),
    "huge maximum": ("json_schema", json.dumps({"exclusiveMinimum": 0.5, "exclusiveMaximum": 10**400})),
    "many digits": ("json_schema", '{"const": ' + "9" * 100_000 + "}"),
    "lone surrogate": ("json_schema", '{"const": "\\ud800"}'),
    "control characters": ("regex", "\0[\0-\x1f]{2,1}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused(service: GrammarService, name: str) -> None:
    """Whatever becomes of the library: an error of the request, remembered, and the rows beside it go on."""
    beside = Follower(service, LETTERS)
    step(service, beside)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="can't be honoured") as caught:
            service.prepare(StructuredOutput(*HOSTILE[name]))
        assert caught.value.param == "structured"
        assert "\n" not in str(caught.value)
    step(service, beside)
    service.close_row(beside.row)


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    service = make_service(WorkerLimits(compile_cpu_s=1))
    with pytest.raises(InvalidRequestError, match="compiling it took longer than 1 s"):
        service.prepare(ENDLESS)
    service.prepare(LETTERS)
    service.close()


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    service = make_service(WorkerLimits(memory_bytes=16 << 20))
    with pytest.raises(InvalidRequestError, match=r"compiling it crashed|too much memory"):
        service.prepare(StructuredOutput("regex", "a{100000}"))
    service.prepare(LETTERS)
    service.close()


def _kill_first(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Kill the first processes that are to compile something; their pids."""
    killed: list[int] = []
    compile_it = Worker.compile

    def compile_killed(self: Worker, *arguments: Any) -> FromWorker:
        if len(killed) < times:
            wait_until(lambda: self.pid is not None)
            assert self.pid is not None
            killed.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        return compile_it(self, *arguments)

    monkeypatch.setattr(Worker, "compile", compile_killed)
    return killed


def test_a_process_that_is_killed_while_it_compiles_is_tried_again(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = _kill_first(monkeypatch, 1)
    beside = Follower(service, StructuredOutput("regex", "tried again"))
    step(service, beside)
    assert len(killed) == 1
    assert not is_alive(killed[0])
    service.close_row(beside.row)


def test_idle_processes_may_be_gone() -> None:
    """All that have compiled before were ended from outside: no grammar is blamed."""
    service = make_service(replace(PATIENT, heavy_s=600))
    for number in range(3):
        service.prepare(StructuredOutput("regex", f"before {number}"))
    for worker in service._idle:
        wait_until(lambda worker=worker: worker.pid is not None)  # type: ignore[misc]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
    assert service._idle
    for number in range(3):
        service.prepare(StructuredOutput("regex", f"after {number}"))
    service.close()


def test_one_that_dies_twice_is_refused_and_not_compiled_again(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = _kill_first(monkeypatch, 3)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"compiling it crashed \(SIGKILL\)"):
            service.prepare(StructuredOutput("regex", "dies twice"))
    assert len(killed) == 2


def test_a_process_compiles_one_grammar_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts as the largest of them, until one is large; then others get a new process."""
    used, compile_it = list[Worker](), Worker.compile

    def noted(self: Worker, *arguments: Any) -> FromWorker:
        used.append(self)
        return compile_it(self, *arguments)

    monkeypatch.setattr(Worker, "compile", noted)
    service = make_service(replace(PATIENT, compilers=1, heavy_s=600))
    for number in range(3):
        service.prepare(StructuredOutput("regex", f"one {number}"))
    assert used[0] is used[1] is used[2]
    sizes = [grammar.memory_bytes for grammar in service.known._all()]
    assert 0 < sizes[0] <= sizes[1] <= sizes[2]
    monkeypatch.setattr(services, "_MOST_USED_BYTES", 0)
    for number in range(3, 5):
        service.prepare(StructuredOutput("regex", f"one {number}"))
    assert used[2] is used[3] is not used[4]
    follower = Follower(service, StructuredOutput("regex", "one [0-9]"))
    step(service, follower)
    service.close()


def test_the_fork_server_is_replaced() -> None:
    service = make_service()
    row = Follower(service, LETTERS)
    step(service, row)
    server = service._factory.current
    assert server is not None
    server._process.kill()
    server._process.wait()
    service.prepare(DIGITS)
    for _ in range(2):
        step(service, row)
    service.close()


def test_without_a_fork_server_grammars_are_refused_for_now() -> None:
    """The refusal is a full queue's: nothing is wrong with the request."""
    for command in (("/nowhere/python",), (sys.executable, "-c", "import sys; sys.exit(3)")):
        service = GrammarService(GrammarTokens(TOKENS, (), (END,), VOCAB_SIZE), server_command=command)
        with pytest.raises(QueueFullError, match="not possible now"):
            service.prepare(LETTERS)
        service.close()


def test_a_service_that_closes_does_not_wait_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_START_LIMIT_S", 10 * HANG_S)
    command = (sys.executable, "-c", "import time; time.sleep(10**6)")
    service = GrammarService(GrammarTokens(TOKENS, (), (END,), VOCAB_SIZE), server_command=command)
    service.start()
    wait_until(lambda: service._factory.starting is not None)
    server = service._factory.starting
    assert server is not None
    closing = threading.Thread(target=service.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert server._process.returncode == -signal.SIGKILL


_CUTTING = """
import json

def cut(argument):
    table = json.loads(argument)
    return lambda text: [table[character] for character in text]

def fail(argument):
    return {}.__getitem__
"""


def test_forced_text_is_cut_as_the_tokenizer_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fails, or there is none, the longest tokens are taken."""
    (tmp_path / "cutting.py").write_text(_CUTTING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    forced = StructuredOutput("choice", '["name value"]')
    table = json.dumps({chr(token[0]): index for token, index in BYTES.items() if token[0] < 128})
    cuts, whole = EncodeSource("cutting", "cut", table), TOKENS.index(b"name")
    fails = [replace(cuts, function="fail"), replace(cuts, function="no"), replace(cuts, module="nowhere"), None]
    for source, first in ((cuts, BYTES[b"n"]), *((each, whole) for each in fails)):
        service = GrammarService(GrammarTokens(TOKENS, (CONTROL,), (END,), VOCAB_SIZE, source))
        service.prepare(forced)
        rows = [service.open_row(forced, ()) for _ in range(6)]
        for mask in served_masks(service, [(row, ()) for row in rows]):
            assert allowed_ids(mask[0]).tolist() == [first]
        service.close()


def test_a_row_that_opens_late_finds_its_grammar_compiled_anew(service: GrammarService) -> None:
    """One that was forgotten, worn out, while the request waited."""
    service.prepare(LETTERS)
    service.known.forget(LETTERS)
    row: GrammarRow = service.open_row(LETTERS, [TOKENS.index(b"a")] * 40)
    (mask,) = served_masks(service, [(row, ())])
    assert allowed_ids(mask[0]).tolist() == [TOKENS.index(b"x")]
    service.close_row(row)


def test_closing_ends_all_processes() -> None:
    service = make_service(PATIENT)
    row = Follower(service, LETTERS)
    step(service, row)
    heard: list[RealizarError | None] = []
    service.prepare_later(ENDLESS, "", heard.append)
    server = service._factory.current
    assert server is not None
    assert row.row.worker is not None
    assert row.row.worker.pid is not None
    pids = [server._process.pid, row.row.worker.pid]
    assert all(map(is_alive, pids))
    service.close()
    service.close()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert [type(error) for error in heard] == [EngineDeadError]
    with pytest.raises(EngineDeadError, match="closed"):
        service.prepare(DIGITS)


_ORPHAN = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_grammar_workers import LETTERS, Follower, make_service, step
service = make_service()
row = Follower(service, LETTERS)
step(service, row)
print(service._factory.current._process.pid, row.row.worker.pid, flush=True)
time.sleep(1000)
"""


def test_processes_end_with_the_engine() -> None:
    """However it ends."""
    folders = (str(Path(__file__).parent), str(Path(__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((folders[1], os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", _ORPHAN, folders[0]]
    with process(command, stdout=subprocess.PIPE, text=True, env=environment) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        engine.kill()
    wait_until(lambda: not any(map(is_alive, pids)))

"""The engine process on a bare socket, against a client that reads slowly, sends nonsense, or is gone."""

from __future__ import annotations

import fcntl
import json
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.process import scripted_process
from realizar.config import EngineConfig
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Event,
    Load,
    Outputs,
    Ping,
    Pong,
    Ready,
    Reply,
    Shutdown,
)
from realizar.ipc.frames import FrameReader, encode_frame
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from scripted_backend import expected_tokens
from waits import HANG_S, wait_until

GREEDY = SamplingParams(temperature=0.0, seed=1)


class RawEngine:
    """A process and our end of its socket."""

    def __init__(self, **options: Any) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, scripted_process.__file__, json.dumps(options), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                text=True,
            )
        self.socket = ours
        self.socket.settimeout(HANG_S)
        self._reader: FrameReader[Event] = FrameReader(Event)
        self._events: list[Event] = []

    def send(self, *commands: object) -> None:
        self.socket.sendall(b"".join(encode_frame(command) for command in commands))

    def next_event(self) -> Event:
        while not self._events:
            data = self.socket.recv(1 << 16)
            assert data, "the engine is gone"
            self._events = self._reader.feed(data)
        return self._events.pop(0)

    def wait_for(self, kind: type) -> Any:
        while not isinstance(event := self.next_event(), kind):
            pass
        return event

    def start(self) -> Ready:
        self.send(Load("unread", EngineConfig()))
        ready: Ready = self.wait_for(Ready)
        return ready

    def last_words(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        status = self.process.wait(HANG_S)
        return status, self.process.stderr.read()


@contextmanager
def raw_engine(**options: Any) -> Iterator[RawEngine]:
    engine = RawEngine(**options)
    try:
        yield engine
    finally:
        engine.socket.close()
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait(HANG_S)
        assert engine.process.stderr is not None
        engine.process.stderr.close()


def request(name: str, prompt: int, max_tokens: int) -> Add:
    return Add(Request(name, (prompt,), GREEDY, max_tokens))


def test_commands_and_their_answers() -> None:
    with raw_engine() as engine:
        info = engine.start().info
        assert (info.vocab_size, info.max_running, info.pid) == (97, 8, engine.process.pid)
        engine.send(request("a", 5, 6))
        assert engine.wait_for(Accepted).request_id == "a"
        tokens: list[int] = []
        while len(tokens) < 6:
            tokens.extend(engine.wait_for(Outputs).deltas.token_list())
        assert tokens == expected_tokens([5], (None,), GREEDY, 6)
        engine.send(Abort("unknown"), Ping(), Ask(4, "stats"), Ask(5, "samples"))
        assert engine.wait_for(Pong) == Pong(0.0)
        asked, wrong = engine.wait_for(Reply), engine.wait_for(Reply)
        stats = asked.value
        assert (asked.number, wrong.number, wrong.error.message) == (4, 5, "an engine has no samples")
        assert (stats.generation_tokens, stats.prompt_tokens, stats.num_used_blocks) == (6, 1, 0)
        engine.send(Shutdown())
        assert engine.last_words() == (0, "")


def wait_full(end: socket.socket) -> None:
    """Wait until the unread bytes have begun to arrive and have stopped growing."""
    sizes = [0]
    while sizes[-1] == 0 or len(set(sizes[-20:])) > 1:
        time.sleep(0.01)
        (size,) = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, b"\0" * 4))
        sizes.append(size)


def test_pings_are_answered_in_the_middle_of_a_step(tmp_path: Path) -> None:
    holds = tmp_path / "holds"
    with raw_engine(holds=str(holds), rows=1) as engine:
        engine.start()
        engine.send(request("a", 5, 3))
        wait_until(holds.exists)  # by this file the engine says that it waits in a step
        engine.send(Ping())
        first = engine.wait_for(Pong)
        engine.send(Ping())
        second = engine.wait_for(Pong)
        assert 0 < first.step_s < second.step_s
        holds.unlink()
        assert engine.wait_for(Outputs).deltas.token_list()


def test_a_slow_consumer_holds_the_engine_up_and_loses_nothing() -> None:
    """The engine's events fill the socket; the engine waits with its steps until they are read."""
    with raw_engine() as engine:
        engine.start()
        listed = replace(GREEDY, logprobs=20)  # they make the messages of a step large
        engine.send(*(Add(Request(str(number), (number,), listed, 200)) for number in range(8)))
        wait_full(engine.socket)
        read_from_s = time.monotonic()
        names: dict[int, str] = {}
        tokens: dict[str, list[int]] = {str(number): [] for number in range(8)}
        produced_s: list[float] = []
        while any(len(found) < 200 for found in tokens.values()):
            deltas = engine.wait_for(Outputs).deltas
            produced_s.append(deltas.produced_s)
            names.update({start.number: start.request_id for start in deltas.starts})
            for number, token_id in zip(deltas.number_list(), deltas.token_list(), strict=True):
                tokens[names[number]].append(token_id)
        assert produced_s == sorted(produced_s)
        assert produced_s[0] < read_from_s < produced_s[-1]
        for number in range(8):
            assert tokens[str(number)] == expected_tokens([number], (None,), GREEDY, 200)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">I", 1 << 31), "exceeds the limit"),
        (struct.pack(">I", 5) + b"\xc1pwnd", "malformed frame"),
        (encode_frame(Reply(1)), "malformed frame"),
    ],
    ids=["long", "garbage", "event"],
)
def test_what_is_no_command_ends_it_with_a_reason(data: bytes, reason: str) -> None:
    with raw_engine() as engine:
        engine.start()
        engine.socket.sendall(data)
        status, said = engine.last_words()
        assert status == 1
        assert reason in said
        assert "Traceback" not in said


@pytest.mark.parametrize("part", [b"", b"\0\0\0\x09abc"], ids=["clean", "mid-frame"])
@pytest.mark.parametrize("when", ["loading", "stepping", "unread"])
def test_it_ends_when_the_socket_closes(tmp_path: Path, part: bytes, when: str) -> None:
    """Silently; also where tokens were not read, which makes of the end a reset connection."""
    holds = tmp_path / "holds"
    with raw_engine(**({"holds": str(holds), "rows": 1} if when == "stepping" else {})) as engine:
        if when != "loading":
            engine.start()
            engine.send(request("a", 5, 200))
        if when == "stepping":
            wait_until(holds.exists)  # by this file the engine says that it waits in a step
        if when == "unread":
            select.select([engine.socket], [], [], HANG_S)
        engine.socket.sendall(part)
        engine.socket.close()
        assert engine.last_words() == (1, "")

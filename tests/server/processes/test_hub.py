"""`Hub` over an engine's link that is played by hand, with API processes that only note what they get."""

from __future__ import annotations

import asyncio
import signal
import socket
from array import array
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from realizar.backends.base import Capacity
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.process.child import LivenessPolicy
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Command,
    EngineBlocked,
    EngineInfo,
    EngineLost,
    Outputs,
    Pong,
    PromptRead,
    Ready,
    Refused,
    Reply,
)
from realizar.errors import EngineDeadError, InvalidRequestError, QueueFullError, RealizarError
from realizar.ipc.error_records import record_error, restore_error
from realizar.ipc.frames import encode_frame
from realizar.outputs import PromptProgress
from realizar.request import NO_CLIENT, Client, Request
from realizar.sampling_params import SamplingParams
from realizar.server.processes import hub as hub_module
from realizar.server.processes.hub import ApiProcess, Hub
from realizar.server.processes.messages import ConnectionsClosed, Start, ToProcess
from realizar.server.settings import ServerSettings
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas
from waits import HANG_S

_Message = TypeVar("_Message")
START = Start("m", ("m",), 64, SamplingParams(), None, 0, ServerSettings(), None, None, "info")
ENDS_AT_ONCE = ("false",)


class Link:
    """The engine's side: what it was sent, and its listener."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    async def start(self, listener: LinkListener) -> None:
        self.listener = listener
        capacity = Capacity(16, (64,), 1, 1, 1, "none", 0.0)
        listener.handle(Ready(EngineInfo("made up", 99, 1, 64, 64, 2, capacity, 0, 1, 1, 16)))

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def close(self, *, at_once: bool = False) -> None:
        pass

    def deltas(self, rows: list[tuple[int, int]], **lists: Any) -> None:
        numbers, tokens = (array(kind, [row[at] for row in rows]).tobytes() for at, kind in enumerate("qi"))
        self.listener.handle(Outputs(StepDeltas(1.0, numbers, tokens, **lists)))


class Process(ApiProcess):
    """Notes what it is sent."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub._take)
        self.got: list[ToProcess] = []
        hub._processes.append(self)

    def send(self, message: ToProcess) -> None:
        self.got.append(message)

    def hand_over(self, connection: socket.socket) -> bool:
        self.num_connections += 1
        return True

    def all_of(self, kind: type[_Message]) -> list[_Message]:
        return [message for message in self.got if isinstance(message, kind)]


class Scene:
    def __init__(self) -> None:
        self.link = Link()
        self.hub = Hub(self.link, (), "m")
        self.engine = self.hub.engine
        self.one, self.two = Process(self.hub), Process(self.hub)

    async def add(
        self,
        process: Process,
        name: str,
        *,
        n: int = 1,
        token: int = 1,
        accept: bool = True,
        client: Client = NO_CLIENT,
    ) -> None:
        request = Request(name, (token,), SamplingParams(n=n, seed=1), 8, client=client)
        process._on_message(process, Add(request))
        await turns()
        if accept:
            self.link.listener.handle(Accepted(name))
            await turns()

    def refusals(self, process: Process) -> list[Exception]:
        return [restore_error(refused.error) for refused in process.all_of(Refused)]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def play(main: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await scene.engine.start()
        await asyncio.wait_for(main(scene), HANG_S)
        await turns()

    asyncio.run(run())


def test_each_process_gets_what_is_of_its_requests() -> None:
    async def main(scene: Scene) -> None:
        link, one, two = scene.link, scene.one, scene.two
        await scene.add(one, "a")
        await scene.add(two, "b", n=2)
        assert (one.all_of(Accepted), two.all_of(Accepted)) == ([Accepted("a")], [Accepted("b")])
        starts = tuple(
            ChoiceStart(number, name, at, 0.5) for number, (name, at) in enumerate((("a", 0), ("b", 0), ("b", 1)))
        )
        link.deltas([(0, 10), (1, 20), (2, 30)], starts=starts)
        link.deltas([(2, 31)], ends=(ChoiceEnd(1, "length"), ChoiceEnd(2, "length")))
        link.deltas([(0, 11), (1, 99)], ends=(ChoiceEnd(0, "stop", 11),))
        tokens = [
            [deltas.token_list() for deltas in (each.deltas for each in process.all_of(Outputs))]
            for process in (one, two)
        ]
        assert tokens == [[[10], [11]], [[20, 30], [31], [99]]]
        await turns()
        assert scene.engine.num_open == len(scene.engine._owned) == len(scene.engine._owned._starts) == 0

    play(main)


def test_the_queue_and_the_names_are_those_of_all_processes() -> None:
    """Two run and one waits."""

    async def main(scene: Scene) -> None:
        for place, process in enumerate((scene.one, scene.two, scene.one)):
            await scene.add(process, f"r{place}")
        await scene.add(scene.two, "r3", accept=False)
        (full,) = scene.refusals(scene.two)
        assert isinstance(full, QueueFullError)
        await scene.add(scene.two, "r0", accept=False)
        assert "in use" in str(scene.refusals(scene.two)[-1])
        scene.one._on_message(scene.one, Abort("r0"))
        await scene.add(scene.two, "r4")
        assert scene.two.all_of(Accepted) == [Accepted("r1"), Accepted("r4")]

    play(main)


def test_a_client_that_fills_the_queue_through_all_processes_keeps_no_other_out() -> None:
    async def main(scene: Scene) -> None:
        greedy = Client("greedy")
        for place, process in enumerate((scene.one, scene.two, scene.one)):
            await scene.add(process, f"r{place}", client=greedy)
        for process in (scene.one, scene.two):
            await scene.add(process, f"more of {id(process)}", client=greedy, accept=False)
            assert isinstance(scene.refusals(process)[-1], QueueFullError)
        for number in range(100):
            await scene.add((scene.one, scene.two)[number % 2], f"other {number}", client=Client(f"{number}"))
        assert len(scene.refusals(scene.one)) == len(scene.refusals(scene.two)) == 1
        sent = [command.request.client.name for command in scene.link.sent if isinstance(command, Add)]
        assert sent == ["greedy"] * 3 + [f"{number}" for number in range(100)]

    play(main)


def test_a_request_that_ends_engines_is_refused_by_whichever_process_it_comes() -> None:
    async def main(scene: Scene) -> None:
        for process in (scene.one, scene.two):
            await scene.add(process, f"bad of {id(process)}", token=7)
            scene.link.listener.handle(EngineLost(record_error(EngineDeadError("dead")), restarting=True))
            await turns()
            assert [each.all_of(EngineLost)[-1].restarting for each in (scene.one, scene.two)] == [True, True]
            assert scene.engine.num_open == len(scene.engine._owned) == 0
            await scene.link.start(scene.link.listener)
        await scene.add(scene.one, "bad again", token=7, accept=False)
        assert isinstance(scene.refusals(scene.one)[-1], InvalidRequestError)
        assert "the engine stopped each time" in str(scene.refusals(scene.one)[-1])
        await scene.add(scene.one, "good", token=8)
        assert scene.one.all_of(Accepted)[-1] == Accepted("good")
        assert (await scene.engine.stats()).num_restarts == 2

    play(main)


@pytest.mark.parametrize("accept", [True, False], ids=["queued", "not yet"])
def test_a_client_that_leaves_ends_its_request_and_no_other_process_can(accept: bool) -> None:
    async def main(scene: Scene) -> None:
        await scene.add(scene.one, "a", accept=accept)
        scene.two._on_message(scene.two, Abort("a"))
        await turns()
        assert Abort("a") not in scene.link.sent
        scene.one._on_message(scene.one, Abort("a"))
        await turns()
        assert scene.link.sent.count(Abort("a")) == 1
        assert scene.engine.num_open == len(scene.engine._owned) == 0
        scene.link.deltas([(0, 1)], starts=(ChoiceStart(0, "a", 0, 0.5),))
        assert scene.one.all_of(Outputs) == []

    play(main)


def test_an_id_that_is_free_again_is_its_next_owner_s() -> None:
    async def main(scene: Scene) -> None:
        await scene.add(scene.one, "a")
        scene.one._on_message(scene.one, Abort("a"))
        await scene.add(scene.two, "a")
        scene.link.deltas([(0, 1)], starts=(ChoiceStart(0, "a", 0, 0.5),))
        assert (len(scene.one.all_of(Outputs)), len(scene.two.all_of(Outputs))) == (0, 1)

    play(main)


def test_progress_of_a_prompt_goes_to_the_process_of_its_request() -> None:
    async def main(scene: Scene) -> None:
        await scene.add(scene.one, "a")
        await scene.add(scene.two, "b")
        progress = PromptProgress(9, 2, 5)
        for name in ("b", "a", "gone"):
            scene.link.listener.handle(PromptRead(name, progress))
        assert scene.one.all_of(PromptRead) == [PromptRead("a", progress)]
        assert scene.two.all_of(PromptRead) == [PromptRead("b", progress)]

    play(main)


def test_a_stop_string_that_a_process_finds_ends_a_choice_alone() -> None:
    async def main(scene: Scene) -> None:
        await scene.add(scene.one, "a", n=2)
        scene.link.deltas([(0, 1), (1, 1)], starts=(ChoiceStart(0, "a", 0, 0.5), ChoiceStart(1, "a", 1, 0.5)))
        for choice, num_open in ((1, 1), (1, 1), (0, 0)):
            scene.one._on_message(scene.one, Abort("a", choice))
            await turns()
            assert scene.engine.num_open == num_open
        assert [each for each in scene.link.sent if isinstance(each, Abort)] == [Abort("a", 1), Abort("a", 0)]

    play(main)


def test_a_process_that_is_gone_ends_its_requests_alone() -> None:
    async def main(scene: Scene) -> None:
        await scene.add(scene.one, "a")
        await scene.add(scene.two, "b")
        scene.hub._abandon(scene.one)
        await turns()
        assert [each for each in scene.link.sent if isinstance(each, Abort)] == [Abort("a")]
        assert list(scene.engine._owned) == ["b"]
        scene.link.listener.handle(EngineBlocked("the file is gone"))
        assert scene.two.all_of(EngineBlocked) == [EngineBlocked("the file is gone")]
        scene.two.num_connections = 3
        scene.two._on_message(scene.two, ConnectionsClosed(2))
        assert scene.two.num_connections == 1

    play(main)


@pytest.mark.parametrize(
    ("command", "how"),
    [("exec sleep 1000", "answered none of 4 pings"), ("kill -STOP $$; exec sleep 1000", "was stopped")],
    ids=["hangs", "stopped"],
)
def test_a_process_that_answers_no_ping_is_ended(command: str, how: str) -> None:
    """A stopped one long before one that may only be slow."""
    few, many = (4, 10_000) if how.endswith("pings") else (10_000, 4)

    async def main(scene: Scene) -> None:
        rules = LivenessPolicy(0.01, max_missed_pings=few, max_stopped_pings=many, start_limit_s=few * 0.01)
        process = ApiProcess(scene.hub._take, rules)
        await process.start(("sh", "-c", command), START)
        assert await process.wait_end() == how
        await process.reap()
        assert not process.takes_connections
        assert process._process is not None
        assert process._process.returncode == -signal.SIGKILL

    play(main)


def test_connections_go_to_processes_that_answer() -> None:
    async def main(scene: Scene) -> None:
        hub = scene.hub
        for process in (scene.one, scene.two):
            process.takes_connections, process.max_connections = True, 9
        with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as clients:
            hub._listener = listener
            listener.setblocking(False)
            address = listener.getsockname()

            def given(count: int) -> list[int]:
                before = [process.num_connections for process in (scene.one, scene.two)]
                for _ in range(count):
                    clients.enter_context(socket.create_connection(address))
                    hub._accept()
                after = [process.num_connections for process in (scene.one, scene.two)]
                return [now - then for now, then in zip(after, before, strict=True)]

            assert given(4) == [2, 2]
            scene.one._missed_pings = 4
            assert given(3) == [0, 3]
            scene.one.data_received(encode_frame(Pong()))
            assert given(3) == [3, 0]
            scene.one._missed_pings = scene.two._missed_pings = 4
            assert sum(given(2)) == 2

    play(main)


def test_requests_are_refused_while_no_engine_runs() -> None:
    async def main(scene: Scene) -> None:
        scene.link.listener.handle(EngineLost(record_error(EngineDeadError("dead")), restarting=True))
        await scene.add(scene.one, "a", accept=False)
        assert "being loaded" in str(scene.refusals(scene.one)[0])

    play(main)


def test_a_process_that_clears_the_cache_hears_when_it_is_done() -> None:
    """Another process hears nothing, and one whose engine is not there is told so."""

    async def main(scene: Scene) -> None:
        scene.one._on_message(scene.one, Ask(7, "clear_cache"))
        await turns()
        (sent,) = (command for command in scene.link.sent if isinstance(command, Ask))
        assert not scene.one.all_of(Reply)
        scene.link.listener.handle(Reply(sent.number))
        await turns()
        assert scene.one.all_of(Reply) == [Reply(7)]
        scene.link.listener.handle(EngineLost(record_error(EngineDeadError("gone")), restarting=True))
        scene.two._on_message(scene.two, Ask(8, "clear_cache"))
        await turns()
        (refused,) = scene.two.all_of(Reply)
        assert refused.number == 8
        assert refused.error is not None
        assert "being loaded" in refused.error.message

    play(main)


def test_a_stop_does_not_wait_for_the_next_start_of_a_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_FIRST_DELAY_S", 100 * HANG_S)

    async def main(scene: Scene) -> None:
        hub = Hub(scene.link, (START,), "m", ENDS_AT_ONCE)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(hub.serve(listener))
            while "another one is started" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.01)
            hub.stop(at_once=False)
            await serving

    play(main)


def test_a_process_that_can_not_start_ends_the_server_only_where_no_other_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_FIRST_DELAY_S", 0.0)

    async def main(scene: Scene) -> None:
        scene.hub._command = ENDS_AT_ONCE
        scene.one.takes_connections = True
        keeping = asyncio.create_task(scene.hub._keep(START))
        while caplog.text.count("another one is started") < 8:
            await asyncio.sleep(0.01)
            assert not keeping.done()
        scene.one.takes_connections = False
        with pytest.raises(RealizarError, match="before it took a connection"):
            await keeping

    play(main)

"""An engine that ends while it is asleep: no other one takes its place, whoever is to blame."""

from __future__ import annotations

import asyncio

import pytest

from realizar.config import EngineConfig
from realizar.engine.process.child import ChildEnd
from realizar.engine.process.messages import Ask, Command, EngineLost, Event, Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.errors import EngineDeadError
from waits import HANG_S


class Listener:
    """Has requests that may be to blame. Attributes: ends: `restarting` of each engine's end."""

    may_be_to_blame = True

    def __init__(self) -> None:
        self.ends: list[bool] = []

    def handle(self, event: Event) -> None:
        assert isinstance(event, EngineLost)
        self.ends.append(event.restarting)


@pytest.mark.parametrize(
    ("commands", "ends"),
    [((Ask(1, "sleep"),), [False]), ((Ask(1, "sleep"), Ask(2, "wake")), [True, False]), ((), [True, False])],
    ids=["asleep", "awake again", "never asleep"],
)
def test_an_engine_that_ends_asleep_is_not_replaced(
    commands: tuple[Command, ...], ends: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        link, listener, runs = ProcessLink(Load("model.gguf", EngineConfig())), Listener(), []

        async def run_one(_: object) -> ChildEnd:
            runs.append(len(runs))
            if len(runs) == 2:
                link.send(Ask(9, "sleep"))  # so that the test ends
            return ChildEnd(EngineDeadError("killed"), False, 1.0)

        monkeypatch.setattr(link, "_run_one", run_one)
        for command in commands:
            link.send(command)
        await asyncio.wait_for(link._supervise(listener), HANG_S)
        assert listener.ends == ends

    asyncio.run(main())

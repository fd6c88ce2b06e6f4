"""A shelf of scripted models: loads, sleep and unloads end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

from realizar.backends.base import Transfer
from realizar.config import EngineConfig
from realizar.engine.planned_load import PlannedLoad
from realizar.errors import RealizarError
from realizar.request import NO_CLIENT, Client
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api, make_api
from realizar.server.metrics import Metrics
from realizar.server.model_facts import ModelFacts
from realizar.server.models.models import ModelLease
from realizar.server.models.shelf import ModelShelf
from realizar.server.models.shelved import KnownModel
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model
from waits import HANG_S


@dataclass
class OwnedEngine(ScriptedEngine):
    """A scripted engine that can die for good. Its `loader` notes how it sleeps, wakes and ends."""

    name: str = ""
    loader: Any = None

    def __post_init__(self) -> None:
        self.death: asyncio.Future[RealizarError] = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> RealizarError:
        return await asyncio.shield(self.death)

    async def audit(self) -> str | None:
        return None

    async def sleep(self) -> Transfer:
        done: Transfer = await self.loader.sleep(self.name)
        return done

    async def wake(self) -> Transfer:
        done: Transfer = await self.loader.wake(self.name)
        return done

    async def close(self, *, at_once: bool = False) -> None:
        await self.loader.unload(self.name)
        self.die(RealizarError("closed"))

    def die(self, error: RealizarError) -> None:
        self.state = "dead"
        if not self.death.done():
            self.death.set_result(error)


class ScriptedLoader:
    """Notes what is loaded and unloaded, and checks that memory stays within the bound.

    Attributes:
        held: names whose loads, unloads and so on wait until they are removed (`let_go`).
        errors: why the loads of some names fail, or their sleep or waking.
        log: `+name` for a load that began, `-name` for an unload, `~name` for sleep and `^name` for waking.
        most, most_host: memory that was ever taken.
    """

    def __init__(self, sizes: dict[str, int], bound: int, asleep: int = 0, host_bound: int = 0) -> None:
        self.sizes, self.bound = sizes, bound
        self.asleep, self.host_bound = asleep, host_bound
        self.most_host = 0
        self._on_host: dict[str, int] = {}
        self.held: set[str] = set()
        self.errors: dict[str, RealizarError] = {}
        self.log: list[str] = []
        self.most = 0
        self.engines: dict[str, OwnedEngine] = {}
        self._there: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def load(self, known: KnownModel, metrics: Metrics) -> Api:
        name = known.name
        self.log.append(f"+{name}")
        assert name not in self._there, f"{name} has two engines"
        self._take(name, self.sizes[name])
        try:
            await self._while_held(name)
            if name in self.errors:
                raise self.errors[name]
        except BaseException:
            del self._there[name]
            raise
        self.engines[name] = engine = OwnedEngine(name=name, loader=self)
        return make_api(cast("Any", engine), scripted_model(names=(name,)), ServerSettings(embeddings="last"), metrics)

    async def unload(self, name: str) -> None:
        self.log.append(f"-{name}")
        await self._while_held(name)
        del self._there[name]
        self._on_host.pop(name, None)

    async def sleep(self, name: str) -> Transfer:
        self.log.append(f"~{name}")
        assert self._there[name] == self.sizes[name], f"{name} is asleep already"
        self._on_host[name] = self.sizes[name]
        self.most_host = max(self.most_host, sum(self._on_host.values()))
        assert sum(self._on_host.values()) <= self.host_bound, self._on_host
        await self._while_held(name)
        if name in self.errors:
            raise self.errors[name]
        self._there[name] = self.asleep
        return Transfer(self.sizes[name], 1.0)

    async def wake(self, name: str) -> Transfer:
        self.log.append(f"^{name}")
        assert self._there[name] == self.asleep, f"{name} is not asleep"
        self._take(name, self.sizes[name])
        await self._while_held(name)
        if name in self.errors:
            raise self.errors[name]
        return Transfer(self.sizes[name], 1.0)

    def _take(self, name: str, size: int) -> None:
        self._there[name] = size
        self.most = max(self.most, sum(self._there.values()))
        assert sum(self._there.values()) <= self.bound, self._there

    def let_go(self, name: str) -> None:
        self.held.discard(name)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _while_held(self, name: str) -> None:
        await asyncio.sleep(0)
        while name in self.held:
            await self._changed.wait()


def known(
    name: str,
    size: int,
    *,
    device: str = "cpu",
    max_open: int = 100,
    asleep: int = 0,
    host: int = 0,
    facts: ModelFacts | None = None,
) -> KnownModel:
    load = PlannedLoad(EngineConfig(), size, device, 512, max_open, host, asleep)
    return KnownModel(name, f"/models/{name}.gguf", load, SamplingParams(), facts or ModelFacts(), 1)


class Case:
    """A shelf whose models have given sizes, of which `bound` bytes fit.

    Args:
        host: bytes in which models may sleep, each with its size; 0 has them unloaded.
        asleep: bytes that a model takes while it sleeps.
    """

    def __init__(
        self,
        bound: int = 2,
        keep_alive_s: float | None = None,
        max_open: int = 100,
        host: int = 0,
        asleep: int = 0,
        **sizes: int,
    ) -> None:
        sizes = sizes or {"a": 1, "b": 1, "c": 1}
        self.loader = ScriptedLoader(sizes, bound, asleep, host)
        models = [
            known(name, size, max_open=max_open, asleep=asleep, host=size if host else 0)
            for name, size in sizes.items()
        ]
        self.shelf = ModelShelf(models, self.loader.load, {"cpu": bound}, keep_alive_s, host)

    def ask(self, name: str, client: Client = NO_CLIENT) -> asyncio.Task[ModelLease]:
        """A request for a model, which waits for it."""
        return asyncio.create_task(self.lease(name, client=client))

    async def lease(self, name: str, keep_alive_s: float | None = None, client: Client = NO_CLIENT) -> ModelLease:
        lease = self.shelf.take(name, keep_alive_s)
        return await self.shelf.wait(name, client) if lease is None else lease

    async def use(self, *names: str) -> None:
        """Requests for models, one after another."""
        for name in names:
            (await self.lease(name)).release()

    def state(self, name: str) -> str:
        return self.shelf.find(name).state

    async def until(self, name: str, state: str) -> None:
        while self.state(name) != state:  # noqa: ASYNC110 - states have no event
            await asyncio.sleep(0)

    async def settled(self) -> None:
        """Let everything happen that waits for nothing else."""
        for _ in range(20):
            await asyncio.sleep(0)


def run(main: Callable[[Case], Coroutine[Any, Any, None]], **options: Any) -> Case:
    """Run a test on an event loop; the shelf is closed at the end."""
    cases: list[Case] = []

    async def all_of_it() -> None:
        case = Case(**options)
        cases.append(case)
        try:
            await asyncio.wait_for(main(case), HANG_S)
        finally:
            for name in list(case.loader.held):
                case.loader.let_go(name)
            await asyncio.wait_for(case.shelf.close(), HANG_S)

    asyncio.run(all_of_it())
    return cases[0]

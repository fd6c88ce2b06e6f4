"""`decide` says which models are loaded or woken next, and which ones make room. Integers only; nothing is done here.

Models get their places by the turns of the clients who wait for them, and a later one never takes the room of an
earlier one. The order is worked out anew after each event, so that nothing is unloaded for a request that has gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from realizar.server.models.shelved import ShelvedModel

Way: TypeAlias = Literal["sleep", "wait", "unload"]
"""How a model makes room. `wait`: it goes to sleep as soon as the host has memory for it, which is on its way."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Changes to be made.

    `loads` are models to load now, or to wake if they are asleep. `yielding` are those that make room, and how, at once
    or after their last request; asleep ones are unloaded.
    """

    loads: list[ShelvedModel] = field(default_factory=list)
    yielding: dict[ShelvedModel, Way] = field(default_factory=dict)


def decide(models: Sequence[ShelvedModel], bytes_of_pools: Mapping[str, int], host_bytes: int = 0) -> Decision:
    """Decide the changes for the requests that wait.

    All models of a device may take `bytes_of_pools` together; weights of models that sleep, or slept, `host_bytes`.
    """
    placing = _Placing(models, bytes_of_pools, host_bytes)
    for model in sorted((each for each in models if each.waiters), key=lambda each: each.turn):
        placing.place(model)
    return placing.decision


class _Placing:
    """Memory as it is now, and as it will be when what has begun, or is decided, has ended."""

    def __init__(self, models: Sequence[ShelvedModel], bytes_of_pools: Mapping[str, int], host_bytes: int) -> None:
        self.decision = Decision()
        self._models = models
        self._free, self._coming = dict(bytes_of_pools), dict(bytes_of_pools)
        self._host_free = self._host_coming = host_bytes
        self._staying: set[ShelvedModel] = set()
        self._full: set[str] = set()
        for model in models:
            self._free[model.load.device] -= model.held_bytes
            self._coming[model.load.device] -= model.coming_bytes
            self._host_free -= model.held_host_bytes
            self._host_coming -= 0 if model.stage == "closing" else model.held_host_bytes

    def place(self, model: ShelvedModel) -> None:
        yielding, pool = self.decision.yielding, model.load.device
        if model.stage in ("loading", "waking", "ready") and model not in yielding:
            self._staying.add(model)
            return
        if pool in self._full:
            return
        way = yielding.get(model, "sleep" if model.stage in ("sleeping", "asleep") else "unload")
        wanted = model.load.num_bytes - (0 if way == "unload" else model.load.asleep_bytes)
        ways = self._make_room(model, wanted - self._coming[pool])
        if ways is None:
            self._full.add(pool)  # those behind it wait too
            return
        for each, way in ways.items():
            self._yield(each, way)
        self._coming[pool] -= wanted
        if model.stage in ("known", "failed", "asleep") and model not in yielding and self._free[pool] >= wanted:
            self.decision.loads.append(model)
        self._free[pool] -= wanted
        self._staying.add(model)

    def _make_room(self, wanting: ShelvedModel, missing: int) -> dict[ShelvedModel, Way] | None:
        """The models that make room of `missing` bytes, and how; None if they can't.

        Idle models go first, the least recently used before the others, then those that sleep, then those in use.
        Where it is too little that they go to sleep, they are unloaded.
        """
        if missing <= 0:
            return {}
        gone = self.decision.yielding
        others = [each for each in self._models if each.load.device == wanting.load.device and each is not wanting]
        may_yield = [each for each in others if each not in gone and each not in self._staying and _may_yield(each)]
        may_yield.sort(key=_order)
        for may_sleep in (True, False):
            ways = {each: _way_of(each, may_sleep=may_sleep) for each in may_yield}
            if _choose(ways, missing):
                return ways
        return None

    def _yield(self, model: ShelvedModel, way: Way) -> None:
        yielding = self.decision.yielding
        if way == "sleep":
            yielding[model] = self._way_to_host(model)
        else:
            yielding[model] = way
            if model.stage == "asleep":
                self._host_coming += model.held_host_bytes
        self._coming[model.load.device] += _gain(model, yielding[model])

    def _way_to_host(self, model: ShelvedModel) -> Way:
        """The way in which a model leaves that is to sleep; models that slept longer make room for its weights."""
        wanted = model.load.host_bytes - model.held_host_bytes
        yielding, ended = self.decision.yielding, list[ShelvedModel]()
        asleep = [each for each in self._models if each.stage == "asleep" and not each.waiters]
        asleep = [each for each in asleep if each not in yielding and each.last_used < model.last_used]
        missing = wanted - self._host_coming
        for each in sorted(asleep, key=lambda each: each.last_used):
            if missing <= 0:
                break
            ended.append(each)
            missing -= each.held_host_bytes
        if missing > 0:
            return "unload"
        for each in ended:
            self._yield(each, "unload")
        self._host_coming -= wanted
        if self._host_free < wanted:
            return "wait"
        self._host_free -= wanted
        return "sleep"


def _choose(ways: dict[ShelvedModel, Way], missing: int) -> bool:
    """Leave as few of the first models in `ways` as make room of `missing` bytes; False if all of them do not."""
    chosen: list[ShelvedModel] = []
    for each, way in ways.items():
        if missing > 0:
            chosen.append(each)
            missing -= _gain(each, way)
    for each in tuple(reversed(chosen)):  # a large one may have made a smaller one needless
        gain = _gain(each, ways[each])
        if missing + gain <= 0:
            chosen.remove(each)
            missing += gain
    for each in ways.keys() - set(chosen):
        del ways[each]
    return missing <= 0


def _gain(model: ShelvedModel, way: Way) -> int:
    """Memory of the device that a model gives back in time, of what is not given back already."""
    return model.coming_bytes - (0 if way == "unload" else model.load.asleep_bytes)


def _way_of(model: ShelvedModel, *, may_sleep: bool) -> Way:
    """One that is unloaded right after its last request does not sleep before."""
    sleeps = may_sleep and model.stage == "ready" and model.load.host_bytes > 0 and model.keep_alive_s != 0
    return "sleep" if sleeps else "unload"


def _order(model: ShelvedModel) -> tuple[int, bool, int]:
    """Those that were to yield already go before others in use: otherwise two models in use might take turns, and
    neither would ever end its requests. Of those that sleep, the ones that are waited for go last.
    """
    if model.stage == "asleep":
        return 1, bool(model.waiters), model.last_used
    return 2 if model.num_leases else 0, not model.is_wanted_away, model.last_used


def _may_yield(model: ShelvedModel) -> bool:
    """True for a model that is loaded or asleep, and for one that is being loaded for nobody any more."""
    return model.stage in ("ready", "asleep") or (model.stage == "loading" and not model.waiters)

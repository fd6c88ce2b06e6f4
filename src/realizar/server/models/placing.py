"""`decide` says which models are loaded next, and which ones make room for them. Integers only; nothing is done here.

Models get their places in the order of their oldest waiting request, and a later one never takes the room of an
earlier one. The order is worked out anew after each event, so that nothing is unloaded for a request that has gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from realizar.server.models.shelved import ShelvedModel


@dataclass(frozen=True, slots=True)
class Decision:
    """Attributes: loads: models to load now. yielding: models that make room, at once or after their last request."""

    loads: list[ShelvedModel] = field(default_factory=list)
    yielding: set[ShelvedModel] = field(default_factory=set)


def decide(models: Sequence[ShelvedModel], bytes_of_pools: Mapping[str, int]) -> Decision:
    """What is to be done for the requests that wait.

    Args:
        bytes_of_pools: memory that all models of a device may take together.
    """
    decision = Decision()
    free, coming = _free_bytes(models, bytes_of_pools)
    staying: set[ShelvedModel] = set()
    full: set[str] = set()
    for model in sorted((each for each in models if each.waiters), key=lambda each: each.waiters[0].number):
        if model.stage in ("loading", "ready") and model not in decision.yielding:
            staying.add(model)
            continue
        if model.pool in full:
            continue
        yielding = _make_room(model, models, model.num_bytes - coming[model.pool], decision.yielding | staying)
        if yielding is None:
            full.add(model.pool)  # those behind it wait too
            continue
        decision.yielding.update(yielding)
        coming[model.pool] += sum(each.num_bytes for each in yielding) - model.num_bytes
        if not model.holds_memory and free[model.pool] >= model.num_bytes:
            decision.loads.append(model)
        free[model.pool] -= model.num_bytes
    return decision


def _free_bytes(
    models: Sequence[ShelvedModel], bytes_of_pools: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each pool that are free now, and that will be when the engines that are closing have ended."""
    free, coming = dict(bytes_of_pools), dict(bytes_of_pools)
    for model in models:
        if model.holds_memory:
            free[model.pool] -= model.num_bytes
            coming[model.pool] -= 0 if model.stage == "closing" else model.num_bytes
    return free, coming


def _make_room(
    wanting: ShelvedModel, models: Sequence[ShelvedModel], missing: int, taken: set[ShelvedModel]
) -> list[ShelvedModel] | None:
    """The models that make room of `missing` bytes, the least recently used first; None if they can't.

    Idle models go before those in use, and those that were to yield already before the others: otherwise two models in
    use might take turns, and neither would ever end its requests.
    """
    if missing <= 0:
        return []
    may_yield = [
        each
        for each in models
        if each.pool == wanting.pool and each is not wanting and each not in taken and _may_yield(each)
    ]
    may_yield.sort(key=lambda each: (each.num_leases > 0, not each.is_wanted_away, each.last_used))
    chosen: list[ShelvedModel] = []
    for each in may_yield:
        if missing <= 0:
            break
        chosen.append(each)
        missing -= each.num_bytes
    if missing > 0:
        return None
    for each in tuple(reversed(chosen)):  # a large one may have made a smaller one needless
        if missing + each.num_bytes <= 0:
            chosen.remove(each)
            missing += each.num_bytes
    return chosen


def _may_yield(model: ShelvedModel) -> bool:
    """True for a loaded model, and for one that is being loaded for nobody any more."""
    return model.stage == "ready" or (model.stage == "loading" and not model.waiters)

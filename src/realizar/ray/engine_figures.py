"""`EngineFigures`: what the engines of a deployment last said of themselves, by replica and added up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from realizar.engine.core.metrics import EngineStats

_MOST_SILENT = 256


class EngineFigures:
    """Figures by replica. The counts of one that leaves stay in the sum, so that no counter falls."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineStats] = {}
        self._silent: dict[str, EngineStats] = {}  # counts of replicas that did not answer: busy ones, or gone
        self._gone = EngineStats()

    @property
    def engines(self) -> Mapping[str, EngineStats]:
        """Those that answered last."""
        return MappingProxyType(self._engines)

    def take(self, answers: Mapping[str, EngineStats]) -> None:
        """Take the figures of all replicas that have answered."""
        for name in self._engines.keys() - answers.keys():
            self._silent[name] = EngineStats().plus(self._engines[name])
        for name in answers:
            self._silent.pop(name, None)
        while len(self._silent) > _MOST_SILENT:
            self._gone = self._gone.added(self._silent.pop(next(iter(self._silent))))
        self._engines = dict(sorted(answers.items()))

    def total(self) -> EngineStats:
        """The sum over all replicas that there have been; what is of the moment, over those that answered last."""
        total = self._gone
        for stats in (*self._silent.values(), *self._engines.values()):
            total = total.added(stats)
        return total

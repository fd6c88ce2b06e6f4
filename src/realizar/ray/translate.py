"""`Translation` makes a replica's events those of one engine: their times, their choices' numbers and request ids."""

from __future__ import annotations

import math
from dataclasses import replace

from realizar.delta_shares import renumbered
from realizar.engine.process.messages import Accepted, Event, Outputs, PromptRead, Refused
from realizar.replicas.numbering import first_number
from realizar.step_deltas import StepDeltas


class Translation:
    """Translates the events of one call.

    Args:
        request_id: the front's own id of the request.
        serial: of the call. The same for all calls that a replica's one engine gets, or never used twice.
    """

    def __init__(self, request_id: str, serial: int) -> None:
        self._request_id, self._first_number = request_id, first_number(serial)
        self._clock_s = math.inf

    def note_clock(self, sent_s: float, received_s: float) -> None:
        """Compare the clocks, by a message and its time on each. The fastest message tells the most."""
        self._clock_s = min(self._clock_s, received_s - sent_s)

    def event(self, event: Accepted | Refused | PromptRead | Outputs, replica: str) -> Event:
        """An event as the front's engine would have sent it. Args: replica: its name."""
        if isinstance(event, Accepted):
            return Accepted(self._request_id, replica)
        if isinstance(event, Refused):
            return Refused(self._request_id, event.error)
        if isinstance(event, PromptRead):
            return PromptRead(self._request_id, event.progress)
        return Outputs(self._deltas(event.deltas))

    def _deltas(self, deltas: StepDeltas) -> StepDeltas:
        clock_s = self._clock_s
        starts = [
            replace(each, request_id=self._request_id, scheduled_s=each.scheduled_s + clock_s) for each in deltas.starts
        ]
        moved = replace(deltas, produced_s=deltas.produced_s + clock_s, starts=tuple(starts))
        return renumbered(moved, self._first_number)

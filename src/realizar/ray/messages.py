"""Messages of a call from a front to an engine's replica, beside the engine's own. msgspec and the nouns."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from realizar.engine.process.messages import Accepted, ErrorRecord, Outputs, PromptRead, Refused


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """The replica's engine is gone, and the request with it. Nothing follows."""

    error: ErrorRecord


CallEvent: TypeAlias = Accepted | Refused | PromptRead | Outputs | Lost


class Reports(msgspec.Struct, frozen=True):
    """The events of one request since the last reports.

    Attributes:
        replica: name of the replica that has the request.
        sent_s: of the replica's `time.monotonic`, which is the clock of all times in `events`.
        events: in order.
    """

    replica: str
    sent_s: float
    events: tuple[CallEvent, ...]

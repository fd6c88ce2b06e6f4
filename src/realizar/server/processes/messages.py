"""Messages between the main process and an API process, beside the engine's own.

An API process sends the commands that it would send to an engine, and gets the engine's events that concern it. It may
ask to `clear_cache`, and for the `exposition`: the metrics of the whole server, as bytes in Prometheus' text format. It
is asked for `samples`: its own metrics.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from realizar.config import EngineConfig
from realizar.engine.frontend.shared_engine import OwnedEvent, StateEvent
from realizar.engine.process.messages import Abort, Add, Ask, Ping, Pong, Reply
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from realizar.server.metrics import MetricSamples
from realizar.server.settings import ServerSettings


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message to an API process: the model that it serves, and its share of the limits.

    Attributes:
        names, context_length, sampling, chat_template, config: as in `make_served_model`.
        created_s: Unix time, the same for all processes.
        settings: with the process's own share of connections and of memory.
        max_queued, pooling: as in `AsyncEngine`.
    """

    model: str
    names: tuple[str, ...]
    context_length: int
    sampling: SamplingParams
    chat_template: str | None
    created_s: int
    settings: ServerSettings
    max_queued: int | None
    pooling: Pooling | None
    log_level: str
    log_format: Literal["text", "json"] = "text"
    config: EngineConfig | None = None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests, and go on with those that are open."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Close all connections when their answers are complete, and end."""


ToProcess: TypeAlias = Start | StateEvent | OwnedEvent | Drain | Stop | Ask | Reply[bytes] | Ping


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process takes connections."""


class ConnectionsClosed(msgspec.Struct, frozen=True, tag="connections_closed"):
    """So many of the connections that the process got are closed."""

    count: int


FromProcess: TypeAlias = Add | Abort | Ask | Reply[tuple[MetricSamples, ...]] | Pong | Started | ConnectionsClosed

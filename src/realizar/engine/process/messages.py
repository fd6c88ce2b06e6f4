"""Messages between an engine and whoever has it: commands in one direction, events in the other. msgspec and the nouns.

An engine on a thread gets the records as they are; `realizar.ipc.frames` writes them as msgpack for one in a process.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from realizar.backends.base import Capacity, Transfer
from realizar.config import Device, EngineConfig
from realizar.engine.stats import EngineStats
from realizar.ipc.error_records import ErrorRecord
from realizar.kv_cache.block_keys import CacheChanges
from realizar.outputs import PromptProgress
from realizar.request import Request
from realizar.step_deltas import StepDeltas

Question: TypeAlias = Literal["stats", "audit", "clear_cache", "sleep", "wake", "samples", "exposition"]
_Value = TypeVar("_Value")


class EngineInfo(msgspec.Struct, frozen=True):
    """Facts of an engine that has loaded its model.

    Attributes:
        context_length: tokens of a request, prompt and output, as configured or from the model.
        max_request_tokens: the same, or the tokens that the KV cache holds if these are fewer.
        max_running: choices in one step.
        pid: of the engine's process.
        queue_length: choices that may wait beyond those, unless the server sets another limit.
        threads: of the CPU backend.
        cached_block_tokens: tokens of a block of the prefix cache; 0 without one.
        device_label: the device's description, with the name of a GPU.
        drafter: as of `DraftedModel.config`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    max_request_tokens: int
    max_running: int
    capacity: Capacity
    pid: int
    queue_length: int
    threads: int
    cached_block_tokens: int
    device: Device = "cpu"
    device_label: str = "cpu"
    drafter: str = "lookup"


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first command to an engine process: the path of a model, and the configuration to run it with.

    `fit_context`: if the model's own context does not fit into memory, the engine takes a half, a quarter and so on.
    `log_level`: the log level in the engine process, one of `logging`'s names in capitals.
    `may_sleep`: the engine will be asked to `Sleep`; for a context that is known to fit.
    `cores`: logical cores that the process may run on; none are all that its parent may.
    `visible_gpus`: the value of CUDA_VISIBLE_DEVICES; None leaves it as it is.
    """

    model: str
    config: EngineConfig
    fit_context: bool = False
    log_level: str = "WARNING"
    may_sleep: bool = False
    cores: tuple[int, ...] = ()
    visible_gpus: str | None = None


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Queue a request; the answer is `Accepted` or `Refused`."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one choice of it. There is no answer."""

    request_id: str
    choice: int | None = None


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for something beside a request; what comes back is a `Reply` with the same number.

    `what`, of an engine: `stats` (`EngineStats`), `audit` (the finding of the block audit, or None), `clear_cache` (the
    prefix cache forgets all that it holds), `sleep` (`Transfer`: the device's memory is given back while no request is
    open) or `wake` (the same, taken again). Between a server's processes see `server.processes.messages`.
    """

    number: int
    what: Question


class WatchKeys(msgspec.Struct, frozen=True, tag="watch_keys"):
    """Report changes of the prefix cache from now on, as `CachedKeys`; the first report has all that it holds."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask for a sign of life. The answer is `Pong`, at once, even in the middle of a step."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine; open requests get no more outputs."""


Command: TypeAlias = Load | Add | Abort | Ask | WatchKeys | Ping | Shutdown


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading: the stage (`what`) and the share done, 0 to 1."""

    what: str
    share: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; the engine executes commands from now on."""

    info: EngineInfo


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """A request is queued. `replica`: the name of the engine that has it, of several; their link sets it."""

    request_id: str
    replica: str = ""


class RequestsLost(msgspec.Struct, frozen=True, tag="requests_lost"):
    """Some requests are gone with one of several engines, whose link reports it; the others go on.

    Attributes:
        request_ids: of requests of which nothing follows.
        blame: requests may be the cause.
        suspects: those that the engine had, some of which go on in another one.
    """

    request_ids: tuple[str, ...]
    error: ErrorRecord
    blame: bool = False
    suspects: tuple[str, ...] = ()


class EngineLost(msgspec.Struct, frozen=True, tag="engine_lost"):
    """The engine is gone, with every request that it had; its link reports it.

    Attributes:
        restarting: another engine is being started.
        blame: a request may be the cause.
        counted: the link's figures go on over restarts, and have this one.
    """

    error: ErrorRecord
    restarting: bool
    blame: bool = True
    counted: bool = False


class EngineBlocked(msgspec.Struct, frozen=True, tag="engine_blocked"):
    """No engine can be started before the model's files change; `reason` is one line without paths."""

    reason: str


class CachedKeys(msgspec.Struct, frozen=True, tag="cached_keys"):
    """The prefix cache has changed; reports are a small part of a second apart."""

    changes: CacheChanges


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    deltas: StepDeltas


class PromptRead(msgspec.Struct, frozen=True, tag="prompt_read"):
    """More of a request's prompt has been read; only for requests that want to know. It comes before what follows."""

    request_id: str
    progress: PromptProgress


class Reply(msgspec.Struct, Generic[_Value], frozen=True, tag="reply"):
    """What was asked for, or why it is not to be had; the other side then is as it was before."""

    number: int
    value: _Value | None = None
    error: ErrorRecord | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """`step_s`: seconds since the running step began, 0 between steps."""

    step_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    request_id: str
    error: ErrorRecord


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: ErrorRecord


Event: TypeAlias = (
    Loading
    | Ready
    | Accepted
    | Refused
    | PromptRead
    | RequestsLost
    | EngineLost
    | EngineBlocked
    | CachedKeys
    | Outputs
    | Reply[EngineStats | Transfer | str]
    | Pong
    | Failed
)

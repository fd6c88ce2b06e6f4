"""`plan_within` plans a load within a share of memory, for a model that is to have others beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from realizar.backends.devices import ChosenDevice
from realizar.backends.kv_blocks import WHOLE_REQUESTS, most_requests
from realizar.backends.memory_plan import MemoryPlan
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import pinned_feature_bytes, plan_memory, plan_tower, resolve_model, tower_on_gpu
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.engine.core.disk_cache import HOST_BYTES
from realizar.engine.core.pictures import KEPT_BYTES
from realizar.engine.draft_models import resolve_drafted
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.towers.find import usable_tower
from realizar.sizes import format_bytes

_T = TypeVar("_T")
SHORTEST_CONTEXT = 512
_FREE_SHARE = 0.9
_CACHE_SHARE = 0.4  # of what a model's weights leave of the memory
_TYPICAL_TOKENS = 1024
_PROCESS_BYTES = 140 << 20  # of an engine on a CPU beside weights, workspace and cache: measured 87 MiB, or 128
# where it compiles kernels.
_BYTES_PER_WORD = 500  # of its vocabulary, for grammars: measured 400
_CONTEXT_BYTES = 700 << 20  # of a GPU, for the driver's and torch's context of a process; an H200 needs less


class PlannedLoad(msgspec.Struct, frozen=True):
    """A load whose memory is known before it.

    Attributes:
        config: with the context and the KV cache that were planned, and the rows of a model with states.
        num_bytes: memory of the device that the engine takes: weights, workspace, KV cache and its process; on a CPU
            what its encoder of images and files of the cache take, too.
        device: `cpu`, or `cuda:0` and so on.
        context_length: tokens of a request, prompt and output.
        max_open: choices that may run and wait in the engine.
        host_bytes: memory of the host that its weights and workspace take while it is asleep; 0 if it can't sleep.
        asleep_bytes: memory of the device that it takes meanwhile: its process, graphs and what lies beside them.
    """

    config: EngineConfig
    num_bytes: int
    device: str
    context_length: int
    max_open: int
    host_bytes: int = 0
    asleep_bytes: int = 0

    @property
    def kind(self) -> Device:
        return "cpu" if self.device == "cpu" else "cuda"


@dataclass(frozen=True, slots=True)
class PlannedEncoder:
    """An encoder of images on a device, by llama.cpp's name of its projector; `workspace_bytes` are for the largest
    picture, and `kept_bytes`, of the host's memory, for embeddings that are or may be wanted again.

    Without a name there is none, and `reason` says why one that lies there is not used.
    """

    name: str | None = None
    file: str | None = None
    weight_bytes: int = 0
    workspace_bytes: int = 0
    kept_bytes: int = 0
    device: Device = "cpu"
    reason: str | None = None

    @property
    def host_bytes(self) -> int:
        """What it takes of the host's memory."""
        return self.kept_bytes + (self.weight_bytes + self.workspace_bytes if self.device == "cpu" else 0)


def plan_encoder(checkpoint: Checkpoint, config: ResolvedConfig, *, may_sleep: bool = False) -> PlannedEncoder:
    """The encoder of a model's images, by headers; `may_sleep` as of `plan_memory`. Raises as `usable_tower`."""
    found, reason = usable_tower(checkpoint, config.mmproj)
    if found is None:
        return PlannedEncoder(reason=reason)
    holder, tower = found
    device: Device = "cpu" if may_sleep or tower_on_gpu(checkpoint, config) is None else "cuda"
    sizes, kept = plan_tower(tower, holder, device), KEPT_BYTES if device == "cpu" else pinned_feature_bytes()
    return PlannedEncoder(tower.architecture, holder.path.name, *sizes, kept, device)


def plan_within(
    checkpoint: Checkpoint, config: EngineConfig, memory_bytes: int | Mapping[str, int] | None,
    device: ChosenDevice | None = None,
) -> tuple[PlannedLoad, int]:  # fmt: skip
    """Plan a load with the model's own context, or the largest half, quarter and so on of it that fits.

    It returns the load and the memory that it may take. CapacityError: the model does not fit; other errors are those
    of `resolve_model` and `plan_memory`, and InvalidRequestError for a model of several GPUs.

    Args:
        config: a context and a size of the KV cache that are configured stay.
        memory_bytes: memory for all models of the device, or of each device by the name that `PlannedLoad` has; None,
            and a device without one, take nine tenths of what is free now.
        device: as of `resolve_model`.
    """
    of_device = memory_bytes if isinstance(memory_bytes, int) else None
    spec, whole, others, _ = resolve_drafted(checkpoint, config, device, of_device)
    if config.tensor_parallel > 1 and whole.chosen.kind == "cuda":
        message = f"a model that is planned beside others has one GPU, and tensor_parallel is {config.tensor_parallel}"
        raise InvalidRequestError(message, "tensor_parallel")
    if config.layers_on is not None:
        raise InvalidRequestError("a model that is planned beside others has one device, and no layers_on", "layers_on")
    config = replace(config, drafter=whole.drafter)
    if isinstance(memory_bytes, Mapping):
        memory_bytes = memory_bytes.get(whole.chosen.place)
    if memory_bytes is None:
        memory_bytes = int(plan_memory(spec, checkpoint, whole, others=others, may_sleep=True).free_bytes * _FREE_SHARE)

    beside_bytes = 0
    if whole.chosen.kind == "cpu":
        beside_bytes = plan_encoder(checkpoint, whole).host_bytes

    def plan(length: int) -> PlannedLoad:
        spec, resolved = resolve_model(checkpoint, replace(config, context_length=length), whole.chosen, memory_bytes)
        found = plan_memory(spec, checkpoint, resolved, memory_bytes, others, may_sleep=True)
        return load_of(found, config, resolved, spec.vocab_size, beside_bytes)

    length = whole.context_length
    return plan(length) if config.context_length is not None else longest_fitting(length, plan), memory_bytes


def longest_fitting(length: int, plan: Callable[[int], _T]) -> _T:
    """The plan of a context of so many tokens, or of the largest half, quarter and so on that raises no CapacityError.

    It raises CapacityError if not even the shortest context worth having fits.
    """
    while True:
        try:
            return plan(length)
        except CapacityError:
            if length // 2 < SHORTEST_CONTEXT:
                raise
            length //= 2


def load_of(
    plan: MemoryPlan, config: EngineConfig, resolved: ResolvedConfig, vocab_size: int, beside_bytes: int = 0
) -> PlannedLoad:
    """It raises CapacityError if the KV cache of one request does not fit, with `beside_bytes` for an encoder."""
    on_gpu = plan.device == "cuda"
    process = _CONTEXT_BYTES if on_gpu else resolved.tensor_parallel * _PROCESS_BYTES + _BYTES_PER_WORD * vocab_size
    fixed = plan.needed_bytes + plan.reserved_bytes + process + beside_bytes
    if not on_gpu:  # the pool of a GPU is its own memory
        fixed += plan.host_snapshot_bytes + (0 if config.cache_dir is None else HOST_BYTES)
    one, left = plan.contexts[-1].request_bytes, max(plan.free_bytes - fixed, 0)
    cache = config.kv_cache_bytes
    if cache is None:
        cache = min(_wanted_cache(plan, resolved), int(left * _CACHE_SHARE))
    if cache > left or cache < one:
        sizes = [format_bytes(size) for size in (plan.free_bytes, fixed, one)]
        raise CapacityError(
            f"the model does not fit into {sizes[0]}: weights, workspace{', encoder of images' if beside_bytes else ''}"
            f" and process take {sizes[1]}, and the KV cache"
            f" of one request of {plan.contexts[-1].context_length} tokens {sizes[2]}"
            + (f", which gets {format_bytes(cache)}" if cache < one <= left else "")
            + (f"; it is to have {format_bytes(cache)} in all" if cache > left >= one else "")
        )
    rows = resolved.max_running if plan.state_bytes else config.max_running
    return PlannedLoad(
        replace(  # the server bounds the queue, by client
            config, context_length=resolved.context_length, kv_cache_bytes=cache, max_running=rows, max_queued=None
        ),
        fixed + cache,
        resolved.chosen.place,
        resolved.context_length,
        resolved.max_running + resolved.queue_length,
        host_bytes=plan.needed_bytes + plan.reserved_bytes if on_gpu else 0,
        asleep_bytes=plan.reserved_bytes + plan.beside_reserved_bytes + process if on_gpu else 0,
    )


def _wanted_cache(plan: MemoryPlan, resolved: ResolvedConfig) -> int:
    """Room for as many requests of a typical length as may run, and for a few of the whole context, ended ones too."""
    whole = int(min(most_requests(resolved), WHOLE_REQUESTS)) * plan.contexts[-1].request_bytes
    typical = next((each for each in plan.contexts if each.context_length >= _TYPICAL_TOKENS), plan.contexts[-1])
    return max(whole, resolved.max_running * typical.request_bytes)

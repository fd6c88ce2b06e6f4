"""`ResolvedConfig`: a configuration in which nothing is left open, made by `resolve_config` alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from realizar.backends.devices import TRAITS, ChosenDevice
from realizar.backends.machine import default_threads
from realizar.config import QUEUED_PER_ROW, EngineConfig
from realizar.errors import InvalidRequestError
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
_FP8_CAPABILITY = (9, 0)  # of GPUs that multiply in FP8 here


@dataclass(frozen=True, slots=True)
class Beside:
    """What another model takes of the device: for weights and workspace, and in a block of each cache group.

    `reserved_bytes`, of the fixed ones, are for sampling, partial sums and graphs, which stay while it sleeps.
    """

    fixed_bytes: int = 0
    block_bytes: tuple[int, ...] = ()
    reserved_bytes: int = 0

    def added_to(self, block_bytes: list[int]) -> list[int]:
        return [own + other for own, other in zip_longest(block_bytes, self.block_bytes, fillvalue=0)]


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers from `first` to before `stop`, which one device computes with a configuration of its own."""

    first: int
    stop: int
    config: ResolvedConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` for one model on one device. Backends, scheduler and commands read these values as they are.

    Only the size of the KV cache is still open where none is configured: it depends on the memory that is free once
    the weights are loaded, and the loaded backend's `Capacity` says what it came to.

    Attributes:
        context_length: tokens that a request may hold, prompt and output; at most the model's.
        max_running: rows, that is sequences that may be in one step.
        speculative_tokens: drafts of a row and step, at most; 0 where nobody drafts.
        kv_dtype: element type of the KV cache: f32, f16, bf16, int8 or fp8.
        prompt_dtype: f16 or fp8.
        queue_length: choices that a server lets wait while as many as possible run.
        steps_in_flight, tile_tokens, stretch: see `DeviceTraits`.
        hidden_layers: indices of layers, ascending, after which each step keeps the residual stream
            (`GivesHiddenStates`).
        beside: another model that the device is shared with.
        kv_blocks: blocks of each cache group, where another model's are shared; None takes what memory allows.
        spans: of `layers_on`, in order; none where one device computes all. `chosen` is the last one's then.
    """

    threads: int
    context_length: int
    max_running: int
    max_step_tokens: int
    speculative_tokens: int
    chosen: ChosenDevice
    kv_dtype: str
    queue_length: int
    steps_in_flight: int
    tile_tokens: int
    stretch: float
    hidden_layers: tuple[int, ...] = ()
    beside: Beside = NOTHING_BESIDE
    kv_blocks: tuple[int, ...] | None = None
    spans: tuple[LayerSpan, ...] = ()

    @property
    def max_blocks(self) -> int:
        """Entries of one row's block table in each cache group."""
        return -(-self.context_length // self.block_size) + 1

    @property
    def device_label(self) -> str:
        """What computes, for people."""
        if not self.spans:
            return self.chosen.label
        return "; ".join(f"layers {span.first} to {span.stop - 1} on {span.config.chosen.label}" for span in self.spans)

    def cache_of_rank(self) -> ResolvedConfig:
        """With a rank's part of the memory that is configured for keys, values and snapshots of all."""
        cache, on_host, ranks = self.kv_cache_bytes, self.host_snapshot_bytes, self.tensor_parallel
        return replace(
            self,
            kv_cache_bytes=None if cache is None else cache // ranks,
            host_snapshot_bytes=None if on_host is None else on_host // ranks,
        )


def resolve_config(
    spec: ModelSpec, config: EngineConfig, device: ChosenDevice, *, float32_weights: bool, fp8_activations: bool = False
) -> ResolvedConfig:
    """Decide every value that a configuration leaves to the model and the device.

    Args:
        float32_weights: the checkpoint stores every matrix in float32 (`WeightTensors.are_float32`).
        fp8_activations: it asks for activations in FP8 (`quantization.tensors.asks_for_fp8`).

    InvalidRequestError: prompts are asked for in FP8, which the device does not multiply, or what several GPUs do not
        do.
    """
    if config.tensor_parallel > 1 and device.kind != "cpu":
        _check_gpus(spec, config)
    threads = default_threads() if config.threads is None else config.threads
    if config.tensor_parallel > threads and device.kind == "cpu":
        raise InvalidRequestError(
            f"tensor_parallel {config.tensor_parallel} needs as many threads, and there are {threads}",
            "tensor_parallel",
        )
    traits = TRAITS[device.kind]
    automatic = "f32" if float32_weights else traits.kv_dtype
    max_running = traits.rows if config.max_running is None else config.max_running
    step_tokens = config.max_step_tokens
    if step_tokens is None:
        step_tokens = max(traits.step_tokens, max_running)
    given: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    derived: dict[str, Any] = {
        "threads": threads,
        "context_length": _context_length(spec, config),
        "max_running": max_running,
        "max_step_tokens": step_tokens,
        "speculative_tokens": config.most_drafts,
        "chosen": device,
        "kv_dtype": automatic if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "prompt_dtype": _prompt_dtype(config, device, asked_for=fp8_activations),
        "queue_length": QUEUED_PER_ROW * max_running if config.max_queued is None else config.max_queued,
        "steps_in_flight": traits.steps_in_flight,
        "tile_tokens": traits.tile_tokens,
        "stretch": traits.stretch,
    }
    return ResolvedConfig(**(given | derived))


def _check_gpus(spec: ModelSpec, config: EngineConfig) -> None:
    """Refuse what several GPUs do not do together, or no two have shown."""
    if spec.state_layers():
        message = f"{spec.architecture}: a model whose layers have states runs on one GPU so far"
        raise InvalidRequestError(message, "tensor_parallel")
    if config.drafter not in ("off", "lookup"):
        message = "tensor_parallel on GPUs has no drafter but the text so far: use --drafter lookup, or off"
        raise InvalidRequestError(message, "drafter")
    if config.cache_dir is not None:
        raise InvalidRequestError("tensor_parallel on GPUs keeps no cache in cache_dir so far", "cache_dir")
    if config.tensor_parallel > 2 and config.batch_invariant:
        message = f"batch_invariant needs sums in one order, which those of {config.tensor_parallel} GPUs have not"
        raise InvalidRequestError(message, "batch_invariant")


def _prompt_dtype(config: EngineConfig, device: ChosenDevice, *, asked_for: bool) -> str:
    runs_fp8 = device.capability == _FP8_CAPABILITY
    if config.prompt_dtype == "auto":
        return "fp8" if asked_for and runs_fp8 and not config.batch_invariant else "f16"
    if config.prompt_dtype == "fp8" and not runs_fp8:
        needed, there = (".".join(map(str, each)) for each in (_FP8_CAPABILITY, device.capability))
        found = "not the CPU" if device.kind == "cpu" else f"and {device.name} has {there}"
        message = f"prompt_dtype fp8 needs an NVIDIA GPU of compute capability {needed}, {found}"
        raise InvalidRequestError(message, "prompt_dtype")
    return config.prompt_dtype


def _context_length(spec: ModelSpec, config: EngineConfig) -> int:
    if config.context_length is None:
        return spec.context_length
    if config.context_length > spec.context_length:
        _LOG.warning(
            "the context is %d tokens, which is all that the model has; %d were asked for",
            spec.context_length,
            config.context_length,
        )
    return min(config.context_length, spec.context_length)

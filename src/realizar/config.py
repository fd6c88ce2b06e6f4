"""Configuration of an engine, said once: the command line and the documents derive from it. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from realizar.errors import InvalidRequestError

InstructionSetName = Literal["avx512_vnni", "avx_vnni", "avx2", "neon_dot", "portable"]
KVCacheDType = Literal["auto", "f16", "bf16", "int8"]
Device = Literal["cuda", "cpu"]
"""Kinds of devices, each with a backend."""

DEFAULT_ROWS: Mapping[Device, int] = {"cpu": 64, "cuda": 256}
"""Sequences that may be in one step where `max_running` is None, by the kind of the device."""
QUEUED_PER_ROW = 4
"""Choices that a server lets wait for each that may run, where no limit is configured."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_LEAST = {
    "threads": 1,
    "context_length": 1,
    "max_running": 1,
    "block_size": 1,
    "max_step_tokens": 1,
    "kv_cache_bytes": 1,
    "typical_request_tokens": 1,
    "max_queued": 1,
    "speculative_tokens": 0,
    "prompt_lookup_max": 1,
    "prompt_lookup_min": 1,
}
_MOST = {"threads": 1024, "max_running": 65_536, "max_step_tokens": 1 << 20, "speculative_tokens": 16}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs a model. A value out of range raises `InvalidRequestError`.

    Attributes:
        device: where the model runs: `cpu`; `cuda`, the first GPU that can run one; `cuda:1`, the second GPU; `auto` is
            `cuda` where there is such a GPU, else `cpu`.
        batch_invariant: on a GPU, true if quantised matmuls and the attention of decodes run alike in every batch, at
            some cost in speed. A row's bits may still depend on the batch where matrices are bf16, fp16 or fp32, and
            where a chunk of a prompt has one token. On the CPU a row always gets the same bits.
        fp8_copies: on a GPU of compute capability 8.9 or more, whether quantised matrices get a copy in FP8 that steps
            of 128 rows and more read: faster, in twice to three times the memory, and with about 3.7 % error in every
            product, far outside of the fidelity that is held otherwise. Not together with batch_invariant.
        graphs: on a GPU, whether the steps of a fixed shape are captured as graphs at load: without, each of a step's
            kernels is launched by the host, which small steps wait for.
        threads: CPU threads, at most 1,024: they wait for each other in loops, and a number mistyped would stop the
            machine. None takes the physical cores, or fewer where a control group limits the
            processor's time.
        kv_cache_dtype: element type of the KV cache; `auto` is f16 on the CPU and bf16 on CUDA, and f32 on the CPU for
            a model whose matrices are all float32.
        context_length: tokens a request may hold, prompt and output; None takes the model's.
        max_running: requests that may be in one step; at most 65,536. None takes what suits the device
            (`DEFAULT_ROWS`).
        block_size: tokens per KV block; a multiple of 32 on the CPU.
        max_step_tokens: token budget of one step, decodes first, then chunks of prefill.
        kv_cache_bytes: memory for the KV cache; None has room for max_running requests of typical_request_tokens, and
            for four of the whole context, bounded by a share of free memory. On a GPU, None takes what is free.
        typical_request_tokens: tokens that a request is expected to take, prompt and output; more or fewer run too.
        instruction_set: CPU instruction set to force (`avx512_vnni`, `avx_vnni`, `avx2`, `neon_dot`, `portable`);
            None takes the best that the processor reports.
        speculative_tokens: tokens of a row that are drafted from its own text and verified in one step; 0 is off. What
            comes out is the same, on a GPU but for ties that other batches decide otherwise.
        prompt_lookup_max, prompt_lookup_min: number of last tokens that must have stood in the text before for what
            followed them to be drafted; the longest run that has is taken.
        max_queued: requests that may wait beyond those that run; None is no limit.
        prefix_cache: start requests from KV blocks that others computed for the same beginning. What comes out is the
            same, on a GPU but for ties as above.
    """

    threads: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    context_length: int | None = None
    max_running: int | None = None
    block_size: int = 32
    max_step_tokens: int = 512
    kv_cache_bytes: int | None = None
    typical_request_tokens: int = 1024
    instruction_set: str | None = None
    speculative_tokens: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    max_queued: int | None = None
    prefix_cache: bool = True
    device: str = "auto"
    batch_invariant: bool = False
    fp8_copies: bool = False
    graphs: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise InvalidRequestError(f"{name} must be an integer, not {value!r}", name)
            if value is not None and value < least:
                raise InvalidRequestError(f"{name} must be at least {least}, not {value}", name)
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InvalidRequestError(f"{name} must be at most {most}, not {value}", name)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidRequestError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max {self.prompt_lookup_max}",
                "prompt_lookup_min",
            )
        if self.fp8_copies and self.batch_invariant:
            raise InvalidRequestError(
                "fp8_copies and batch_invariant can't be combined: only steps of many rows use the copies", "fp8_copies"
            )
        if self.kv_cache_dtype not in get_args(KVCacheDType):
            known = ", ".join(get_args(KVCacheDType))
            raise InvalidRequestError(
                f"kv_cache_dtype must be one of {known}, not {self.kv_cache_dtype}", "kv_cache_dtype"
            )
        if self.instruction_set is not None and self.instruction_set not in get_args(InstructionSetName):
            known = ", ".join(get_args(InstructionSetName))
            raise InvalidRequestError(
                f"instruction_set must be one of {known}, not {self.instruction_set}", "instruction_set"
            )
        if not is_device(self.device):
            raise InvalidRequestError(f"device must be auto, cpu, cuda or cuda:N, not {self.device}", "device")


def is_device(text: str) -> bool:
    """Whether a text names a device: `auto`, `cpu`, `cuda`, or a GPU by its number, `cuda:1`."""
    return _DEVICE.fullmatch(text) is not None

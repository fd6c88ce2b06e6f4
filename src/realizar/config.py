"""The configuration of an engine; the command line and the documents derive from it. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from realizar.errors import InvalidRequestError
from realizar.ranges import check_ranges, number

InstructionSetName = Literal["avx512_vnni", "avx_vnni", "avx2", "neon_dot", "portable"]
KVCacheDType = Literal["auto", "f16", "bf16", "int8", "fp8"]
PromptDType = Literal["auto", "f16", "fp8"]
Device = Literal["cuda", "cpu"]
"""Kinds of devices, each with a backend."""

QUEUED_PER_ROW = 4
"""Choices that a server lets wait for each that may run, where no limit is configured."""

MODEL_DRAFTS = 3
"""Drafts of a row and step by a model or a next-token block, where no number is configured: llama.cpp's default."""

_DRAFTERS = ("off", "lookup", "auto")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_LAYERS_ON = re.compile(r"(cpu|cuda(?::\d{1,3})?)=([1-9]\d{0,3}|rest)")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine. A value out of range raises `InvalidRequestError`.

    Attributes:
        device: `cpu`; `cuda`, the first GPU that can run a model; `cuda:1`, the second GPU; `auto` is `cuda` if there
            is such a GPU, else `cpu`.
        batch_invariant: on a GPU, true gives every sum of matmuls and attention one order, at some cost in speed: a
            token's logits have the same bits in every batch, chunk and state of the prefix cache. On the CPU they
            always have.
        prompt_dtype: in what a GPU multiplies steps with prompts. `fp8`, on compute capability 9.0 alone, is e4m3 for
            weights and activations of steps of 1,024 tokens and more, or of 128 where weights are stored so, and of
            experts with 512 pairs each, or 32: it is faster, and loses far more than all else here, a mean KL of 0.01
            to 0.02 nats where halves have 0.00004. It can't be combined with batch_invariant. `auto` is `fp8` there
            without batch_invariant for a checkpoint that asks for activations in FP8, else `f16`.
        graphs: on a GPU, true captures the steps of fixed shapes as graphs at load. Otherwise the host launches each
            kernel of a step, and small steps wait for the host.
        device_check: true compares a GPU with the CPU on small models, where no verdict on its card, driver and kernels
            is kept, and goes without the kernels that it gets wrong. False trusts it.
        tensor_parallel: processes that compute the model together, a part of every matrix each: of so many GPUs from
            the chosen one on, or on the CPU with a part of the threads each. There sums have one order, and so the same
            bits in every run.
        layers_on: devices that compute some of the layers each, one after another, such as `cuda:0=20,cpu=rest`; one
            may have what the others leave. None computes all on `device`.
        threads: CPU threads; None takes the physical cores, or fewer if a control group limits the processor's time.
        kv_cache_dtype: element type of the KV cache; `auto` is f16 on the CPU and bf16 on CUDA, and f32 on the CPU for
            a model whose matrices are all float32. `int8` has a scale for 32 numbers of a head. `fp8` is e4m3, with one
            scale for a layer's keys and one for its values: those of the checkpoint, or none. It is the smallest, and
            loses several times what int8 does.
        context_length: maximum of prompt and output tokens of a request; None takes the model's.
        max_running: maximum of sequences in one step, up to 65,536. None takes the device's default
            (`DeviceTraits.rows`), and on a GPU fewer for a model whose states would take too much of its memory.
        block_size: tokens per KV block; a multiple of 32 on the CPU.
        max_step_tokens: token budget of one step, decodes first, then chunks of prefill. None takes the device's
            default (`DeviceTraits.step_tokens`), and at least one token for each of max_running.
        kv_cache_bytes: memory for the KV cache; None has room for max_running requests of typical_request_tokens, and
            for 1 to 4 of the whole context, bounded by a share of free memory. On a GPU, None takes the free memory.
        host_snapshot_bytes: memory of the host for snapshots of states that have no room on the device, of a model
            whose layers have states. None takes none on the CPU, and for a GPU an eighth of what is free, at most
            4 GiB, divided by host_sharers.
        cache_dir: a folder in which blocks and snapshots of the prefix cache are kept beyond the engine's end: a prompt
            starts from what an engine before it computed, where reading is faster than computing. It is its user's
            alone, as blocks tell what was written. None keeps nothing.
        cache_dir_bytes: of all files there, of all models; what was not used for longest is removed. None takes half of
            what the disk has free, at most 64 GiB.
        host_sharers: engines that share the host's memory, each with its part of what host_snapshot_bytes is then.
        typical_request_tokens: expected prompt and output tokens of a request; longer and shorter ones run too.
        expert_used_count: experts that a token goes through in each mixture, which changes answers; None takes the
            model's.
        instruction_set: CPU instruction set to force (`avx512_vnni`, `avx_vnni`, `avx2`, `neon_dot`, `portable`);
            None takes the best that the processor reports.
        drafter: who drafts tokens that may follow a row's: `lookup`, its own text, and its grammar where that forces
            them; `off`, nobody; `auto`, the next-token block of the model's own file too, or a drafter in a file beside
            it, where one suits the model and runs on the device; else the path or name of a smaller model with the same
            vocabulary, of a next-token block by itself, of an EAGLE-3 head, a DFlash drafter or an assistant of Gemma
            4's. These draft where the text does not. Drafts are verified, so that the output is the
            same, except for ties on a GPU, which other batches may decide otherwise.
        speculative_tokens: tokens of a row that are drafted and verified in one step; 0 turns it off. None is
            `MODEL_DRAFTS` where a model or a block drafts, else 0.
        prompt_lookup_max, prompt_lookup_min: number of last tokens that must occur earlier in the text; the tokens
            after that occurrence are drafted. The longest match is taken; behind drafts that were all wrong only one
            of `prompt_lookup_max`.
        mmproj: who encodes images: `auto`, the tower of the model's own files or an `mmproj` file beside a GGUF file,
            and nobody where that does not suit the model; `none`, nobody; else the path of such a file, which has to
            suit it.
        image_max_tokens: maximum of the tokens that an image's features take, to which larger ones are reduced; None
            takes the model's.
        max_queued: maximum of requests that wait beyond those that run; None is no limit.
        prefix_cache: start requests from KV blocks that others computed for the same prefix. The output is the same,
            except for ties on a GPU, as above.
    """

    tensor_parallel: int = number(1, 1, 64)
    layers_on: str | None = None
    threads: int | None = number(None, 1, 1024)  # they wait in loops: a mistyped number would stop the machine
    kv_cache_dtype: KVCacheDType = "auto"
    context_length: int | None = number(None, 1)
    max_running: int | None = number(None, 1, 65_536)
    block_size: int = number(32, 1)
    max_step_tokens: int | None = number(None, 1, 1 << 20)
    kv_cache_bytes: int | None = number(None, 1)
    host_snapshot_bytes: int | None = number(None, 0)
    cache_dir: str | None = None
    cache_dir_bytes: int | None = number(None, 1)
    host_sharers: int = number(1, 1)
    typical_request_tokens: int = number(1024, 1)
    expert_used_count: int | None = number(None, 1)
    instruction_set: str | None = None
    drafter: str = "lookup"
    speculative_tokens: int | None = number(None, 0, 16)
    prompt_lookup_max: int = number(4, 1)
    prompt_lookup_min: int = number(2, 1)
    mmproj: str = "auto"
    image_max_tokens: int | None = number(None, 1)
    max_queued: int | None = number(None, 1)
    prefix_cache: bool = True
    device: str = "auto"
    batch_invariant: bool = False
    prompt_dtype: PromptDType = "auto"
    graphs: bool = True
    device_check: bool = True

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidRequestError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max {self.prompt_lookup_max}",
                "prompt_lookup_min",
            )
        if self.prompt_dtype == "fp8" and self.batch_invariant:
            raise InvalidRequestError(
                "prompt_dtype fp8 and batch_invariant can't be combined: only long steps are multiplied in fp8",
                "prompt_dtype",
            )
        self._check_layers_on()
        if self.cache_dir is not None and not (self.cache_dir and self.prefix_cache):
            why = "needs the prefix cache" if self.cache_dir else "must name a folder, not be empty"
            raise InvalidRequestError(f"cache_dir {why}", "cache_dir")
        known_values = {
            "kv_cache_dtype": KVCacheDType, "prompt_dtype": PromptDType, "instruction_set": InstructionSetName,
        }  # fmt: skip
        for name, kind in known_values.items():
            value, known = getattr(self, name), get_args(kind)
            if value not in known and (value is not None or name != "instruction_set"):
                raise InvalidRequestError(f"{name} must be one of {', '.join(known)}, not {value}", name)
        if not is_device(self.device):
            raise InvalidRequestError(f"device must be auto, cpu, cuda or cuda:N, not {self.device}", "device")
        if not self.drafter:
            raise InvalidRequestError("drafter must be off, lookup, auto, or a model, not an empty text", "drafter")
        if not self.mmproj:
            raise InvalidRequestError("mmproj must be auto, none, or a file, not an empty text", "mmproj")

    def _check_layers_on(self) -> None:
        if self.layers_on is None:
            return
        beside = {
            "tensor_parallel": self.tensor_parallel > 1, "cache_dir": self.cache_dir is not None,
            "drafter": self.drafter not in ("off", "lookup"), "device": self.device != "auto",
            "host_snapshot_bytes": bool(self.host_snapshot_bytes),
        }  # fmt: skip
        for name, is_given in beside.items():
            if is_given:
                raise InvalidRequestError(f"layers_on and {name} can't be combined", name)
        read_layers_on(self.layers_on)

    @property
    def draft_model(self) -> str | None:
        """The path or name of the model that drafts; None where none does."""
        return None if self.drafter in _DRAFTERS or self.speculative_tokens == 0 else self.drafter

    @property
    def most_drafts(self) -> int:
        """Drafts of a row and step, at most; 0 where nobody drafts."""
        if self.drafter == "off":
            return 0
        automatic = 0 if self.drafter == "lookup" else MODEL_DRAFTS
        return automatic if self.speculative_tokens is None else self.speculative_tokens


def read_layers_on(text: str) -> tuple[tuple[str, int | None], ...]:
    """Devices and how many layers each computes, in the order of the layers; None is the rest.

    InvalidRequestError: it does not read so, a device comes twice, there are several GPUs, or several take the rest.
    """
    found: list[tuple[str, int | None]] = []
    for part in text.split(","):
        match = _LAYERS_ON.fullmatch(part.strip())
        if match is None:
            message = f"layers_on reads like cuda:0=20,cpu=rest, and {part.strip()!r} is no device with its layers"
            raise InvalidRequestError(message, "layers_on")
        found.append((match[1], None if match[2] == "rest" else int(match[2])))
    places = [device.partition(":")[0] for device, _ in found]
    for kind in dict.fromkeys(places):
        if places.count(kind) > 1:
            what = "the CPU" if kind == "cpu" else "one GPU so far"
            raise InvalidRequestError(f"layers_on names {what} once, not {places.count(kind)} times", "layers_on")
    if sum(count is None for _, count in found) > 1:
        raise InvalidRequestError("layers_on leaves the rest of the layers to one device, not to several", "layers_on")
    return tuple(found)


def is_device(text: str) -> bool:
    """True if a text names a device: `auto`, `cpu`, `cuda`, or a GPU by its number, `cuda:1`."""
    return _DEVICE.fullmatch(text) is not None

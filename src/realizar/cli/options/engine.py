"""Options that become an `EngineConfig`. Every command that loads or plans a model takes them from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from realizar.backends.devices import TRAITS
from realizar.cli.options.arguments import DeviceName, Integer, MaybeInteger, MaybeSize
from realizar.config import MODEL_DRAFTS, QUEUED_PER_ROW, EngineConfig, KVCacheDType, PromptDType
from realizar.errors import InvalidRequestError

_DEFAULTS = EngineConfig()
_MAX_RUNNING = (
    f"maximum of answers that run at once; default {TRAITS['cpu'].rows}, or {TRAITS['cuda'].rows} on a GPU,"
    " and fewer there of a model whose states would take over a third of the memory beside its weights."
)
_MAX_STEP_TOKENS = (
    f"maximum of tokens computed in one step; default {TRAITS['cpu'].step_tokens}, or {TRAITS['cuda'].step_tokens} "
    "on a GPU, and at least --max-running."
)
_SPECULATIVE_TOKENS = (
    f"maximum of tokens drafted for an answer and step; 0 is off; default {MODEL_DRAFTS} by a model, and 0 by the text."
)
_MAX_QUEUED = f"maximum of waiting answers; more are refused. Default {QUEUED_PER_ROW} times --max-running."


@Parameter(name="*", group="Engine", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """Options of commands whose own work sets the context length and the batch.

    Attributes:
        device: device to run on: cpu, cuda, or cuda:1 for the second GPU; auto is a GPU that can run it, else the CPU.
        tensor_parallel: processes that compute the model together, each with a GPU or its part of the threads.
        layers_on: devices with some of the layers each, in order: cuda:0=20,cpu=rest has 20 on the GPU.
        batch_invariant: on a GPU, the same bits of logits in every batch and chunk, as a CPU always gives; slower.
        prompt_dtype: what prompts are multiplied in; fp8, on Hopper (9.0), is faster at a KL of 0.01 to 0.02 nats.
            auto is fp8 there for a checkpoint that asks for activations in FP8, else f16.
        threads: CPU threads; default the physical cores, or fewer where a control group limits the processor's time.
        no_graphs: on a GPU, launch every kernel by itself instead of capturing steps as graphs.
        no_device_check: trust a GPU without comparing it with the CPU at its first load, and whatever came of that.
        kv_cache_dtype: element type of the KV cache; fp8 has the checkpoint's scales, or its own for large biases.
        expert_used_count: experts that a token goes through in each layer, which changes answers; default the model's.
        instruction_set: CPU instruction set to force; `realizar doctor` lists them.
    """

    device: DeviceName = _DEFAULTS.device
    tensor_parallel: Annotated[Integer, Parameter(name=("--tensor-parallel", "--tensor-parallel-size", "-tp"))] = 1
    layers_on: str | None = None
    batch_invariant: bool = False
    prompt_dtype: Annotated[PromptDType, Parameter(name="--prompt-dtype")] = _DEFAULTS.prompt_dtype
    threads: Annotated[MaybeInteger, Parameter(name=("--threads", "-t"))] = None
    no_graphs: bool = False
    no_device_check: bool = False
    kv_cache_dtype: Annotated[KVCacheDType, Parameter(name="--kv-cache-dtype")] = _DEFAULTS.kv_cache_dtype
    expert_used_count: MaybeInteger = None
    instruction_set: str | None = None

    def config(self) -> EngineConfig:
        """It raises InvalidRequestError if a value is out of range."""
        given = {name: value for name, value in asdict(self).items() if not name.startswith("no_")}
        return EngineConfig(graphs=not self.no_graphs, device_check=not self.no_device_check, **given)


@Parameter(name="*", group="Engine", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(BackendOptions):
    """Options of commands that run requests.

    Attributes:
        context_length: maximum of prompt and answer tokens together; default the model's.
        mmproj: GGUF file of an encoder of images; none reads no images; auto takes what lies beside the model.
        image_max_tokens: maximum of tokens for an image's pixels; larger ones are reduced; default the model's.
    """

    context_length: Annotated[
        MaybeInteger, Parameter(name=("--context-length", "--ctx-size", "--max-model-len", "-c"))
    ] = None
    mmproj: Annotated[str, Parameter(name=("--mmproj", "-mm"))] = _DEFAULTS.mmproj
    image_max_tokens: MaybeInteger = None


@Parameter(name="*", group="Drafts", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """Options of drafts: tokens that are guessed, and verified several in one step. Answers are the same.

    Attributes:
        drafter: lookup, the text and its grammar; off; auto, the model's file or one beside it too; or a model's name.
    """

    drafter: Annotated[
        str, Parameter(name=("--drafter", "--draft-model", "--spec-draft-model", "--model-draft", "-md"))
    ] = _DEFAULTS.drafter
    speculative_tokens: Annotated[
        MaybeInteger,
        Parameter(
            name=("--speculative-tokens", "--num-speculative-tokens", "--spec-draft-n-max"), help=_SPECULATIVE_TOKENS
        ),
    ] = None

    def config(self, base: EngineConfig) -> EngineConfig:
        """Apply these options to the configuration `base`. It raises InvalidRequestError if a value is out of range."""
        return replace(base, **asdict(self))


@Parameter(name="*", group="Batching", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """Options of batching and the queue. Defaults that depend on the device are part of the parameters' help.

    Attributes:
        kv_cache_bytes: memory of the KV cache, such as 8G; default as `realizar plan` says, or a GPU's free memory.
        host_snapshot_bytes: host memory for states; 0 is off; default on a GPU an eighth of what is free, up to 4 GiB.
        cache_dir: folder that keeps the KV cache of prompts beyond a restart; default none.
        cache_dir_bytes: of its files, such as 100G; default half of what the disk has free, up to 64 GiB.
        no_prefix_cache: do not reuse the KV cache of prompts with the same prefix.
    """

    max_running: Annotated[
        MaybeInteger,
        Parameter(name=("--max-running", "--max-num-seqs", "--parallel", "-np"), help=_MAX_RUNNING),
    ] = None
    max_queued: Annotated[MaybeInteger, Parameter(help=_MAX_QUEUED)] = None
    max_step_tokens: Annotated[
        MaybeInteger,
        Parameter(name=("--max-step-tokens", "--max-num-batched-tokens", "--batch-size", "-b"), help=_MAX_STEP_TOKENS),
    ] = None
    kv_cache_bytes: Annotated[MaybeSize, Parameter(name=("--kv-cache-bytes", "--kv-cache-memory-bytes"))] = None
    host_snapshot_bytes: MaybeSize = None
    cache_dir: str | None = None
    cache_dir_bytes: MaybeSize = None
    no_prefix_cache: Annotated[bool, Parameter(name=("--no-prefix-cache", "--no-enable-prefix-caching"))] = False

    def config(self, base: EngineConfig) -> EngineConfig:
        """Apply these options to the configuration `base`. It raises InvalidRequestError if a value is out of range."""
        if self.max_queued is not None and self.max_queued < 0:
            raise InvalidRequestError(f"max_queued must be at least 0, not {self.max_queued}", "max_queued")
        given = asdict(self)
        del given["no_prefix_cache"], given["max_queued"]  # which bounds what is sent to an engine, not the engine
        return replace(base, prefix_cache=not self.no_prefix_cache, **given)

"""What a model will take in memory on the CPU, from its header alone: the sizes that loading it would come to."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernels.float_linear import FLOAT_TYPES
from realizar.backends.cpu.kv_memory import KVSizes, free_memory_bytes, kv_limit_bytes
from realizar.backends.cpu.pack import packed_bytes
from realizar.backends.cpu.pack_floats import packed_float_bytes
from realizar.backends.cpu.runner import MAX_SELECTED, PARTIAL_FLOATS
from realizar.backends.cpu.workspace import Workspace
from realizar.backends.program import Project, build_program
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.check_tensors import check_tensors
from realizar.models.spec import Linear, ModelSpec

_SHORTEST_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Requests of one length.

    Attributes:
        context_length: tokens of each, prompt and output.
        request_bytes: of KV cache that one takes.
        num_requests: how many fit at once, whatever the engine's own limit.
    """

    context_length: int
    request_bytes: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes.

    Attributes:
        weight_bytes: of all matrices, packed.
        embedding_bytes: of the embedding, which stays in its file and is read from there.
        workspace_bytes: of a step.
        kv_dtype: element type of the KV cache. kv_bytes_per_token: of a request's first tokens, in all layers.
        kv_limit_bytes: what the KV cache may take: as configured, or a share of what weights leave free.
        free_bytes: memory that was free when asked.
        contexts: powers of two up to the model's context, and that.
    """

    weight_bytes: int
    embedding_bytes: int
    workspace_bytes: int
    kv_dtype: str
    kv_bytes_per_token: float
    kv_limit_bytes: int
    free_bytes: int
    contexts: tuple[ContextPlan, ...]


def plan_memory(
    spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, free_bytes: int | None = None
) -> MemoryPlan:
    """Sizes of a model, without reading its weights.

    Args:
        free_bytes: to plan for; None is what this machine has free now.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape.
        UnsupportedModelError: a tensor's type does not run.
        CapacityError: the block size does not suit the CPU.
    """
    check_tensors(spec, checkpoint)
    instructions = select(config.instruction_set)
    program = build_program(spec)
    linears = {op.linear.weight: op.linear for op in program.body + program.tail if isinstance(op, Project)}
    weight_bytes = sum(_matrix_bytes(spec, checkpoint, linear, instructions.lanes) for linear in linears.values())
    context = min(config.context_length or spec.context_length, spec.context_length)
    blocks = -(-context // config.block_size) + 1
    workspace = Workspace(  # reserved, never written: it costs nothing
        spec, config.max_step_tokens, MAX_SELECTED, config.max_running, blocks, instructions.tile_tokens[0]
    )
    automatic = "f32" if all(_type(spec, checkpoint, linear) == "F32" for linear in linears.values()) else "f16"
    free = free_memory_bytes() if free_bytes is None else free_bytes
    limit = kv_limit_bytes(config, free)
    sizes = [KVSizes(spec, config, length, automatic) for length in _lengths(context)]
    return MemoryPlan(
        weight_bytes=weight_bytes,
        embedding_bytes=checkpoint.tensors[spec.tensors[spec.embedding].name].size_bytes,
        workspace_bytes=workspace.size_bytes + 4 * PARTIAL_FLOATS,
        kv_dtype=sizes[0].dtype,
        kv_bytes_per_token=sum(sizes[0].block_bytes) / config.block_size,
        kv_limit_bytes=limit,
        free_bytes=free,
        contexts=tuple(
            ContextPlan(each.context_length, each.request_bytes, limit // each.request_bytes) for each in sizes
        ),
    )


def _lengths(context: int) -> list[int]:
    lengths = [_SHORTEST_CONTEXT << power for power in range(40) if _SHORTEST_CONTEXT << power < context]
    return [*lengths, context]


def _type(spec: ModelSpec, checkpoint: Checkpoint, linear: Linear) -> str:
    return checkpoint.tensors[spec.tensors[linear.weight].name].ggml_type.name


def _matrix_bytes(spec: ModelSpec, checkpoint: Checkpoint, linear: Linear, lanes: int) -> int:
    ggml_type = checkpoint.tensors[spec.tensors[linear.weight].name].ggml_type
    if ggml_type.name.lower() in FLOAT_TYPES:
        return packed_float_bytes(ggml_type, linear.out_features, linear.in_features, lanes)
    return packed_bytes(ggml_type.name, linear.out_features, linear.in_features, lanes)

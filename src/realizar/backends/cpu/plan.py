"""Planned memory of a model on the CPU, from its header alone: what a load allocates is made without bytes."""

from __future__ import annotations

from dataclasses import replace

from realizar.backends.base import NO_OTHERS, ModelSource, OtherModels
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernels.sampling.record import scratch_bytes
from realizar.backends.cpu.kv.memory import KVSizes, check_kv_bytes, kv_limit_bytes, most_kv_bytes
from realizar.backends.cpu.load import PARTIAL_FLOATS
from realizar.backends.cpu.state.sizes import state_sizes
from realizar.backends.cpu.supported import SUPPORTED
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import no_bytes
from realizar.backends.cpu.workspace import Workspace, most_selected
from realizar.backends.draft_model import drafter_bytes, drafter_config, shared_with
from realizar.backends.kv_blocks import host_snapshots_within
from realizar.backends.machine import free_memory_bytes, memory_bytes
from realizar.backends.memory_plan import ContextPlan, MemoryPlan, plan_of_ranks, planned_lengths
from realizar.backends.rank_memory import slot_bytes
from realizar.backends.resolved_config import Beside, ResolvedConfig
from realizar.backends.supported import find_drafter, parts_of
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec


def plan_memory(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, free_bytes: int | None = None,
    lent: Weights | None = None,
) -> MemoryPlan:  # fmt: skip
    """Sizes of a model, without reading its weights; `free_bytes` None takes what this machine has free now.

    `lent` are reserved weights of a model that is loaded before it, as `Weights` takes them.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape.
        UnsupportedModelError: the CPU backend does not run a part of the model, or a tensor's type.
        CapacityError: the block size does not suit the CPU.
    """
    SUPPORTED.check(spec)
    check_tensors(spec, checkpoint)
    instructions = select(config.instruction_set)
    tensors = WeightTensors(spec, checkpoint)
    workspace = Workspace(spec, config, instructions.tile_tokens[0], tensors.widest_ordered())  # never written
    weights = Weights(spec, checkpoint, instructions.lanes, config.threads, lent)
    weights.reserve(spec.matrices(), no_bytes)
    machine = memory_bytes() if free_bytes is None else None
    free = free_memory_bytes() if free_bytes is None else free_bytes
    sizes = [KVSizes(spec, replace(config, context_length=length)) for length in planned_lengths(config.context_length)]
    limit = kv_limit_bytes(spec, config, sizes[-1], free, machine)
    states, num_snapshots = state_sizes(spec, config.speculative_tokens), sizes[-1].num_snapshots(limit)
    blocks = limit - num_snapshots * states.slot_bytes
    on_host = host_snapshots_within(config, states.slot_bytes, num_snapshots)
    return MemoryPlan(
        device="cpu",
        weight_bytes=weights.size_bytes,
        token_weight_bytes=weights.token_bytes,
        embedding_bytes=tensors.table_bytes,
        workspace_bytes=workspace.size_bytes
        + 4 * PARTIAL_FLOATS
        + config.threads * scratch_bytes(spec.vocab_size)
        + config.max_running * states.row_bytes,
        kv_dtype=sizes[0].dtype,
        kv_bytes_per_token=sum(sizes[0].block_bytes) / config.block_size,
        kv_limit_bytes=limit,
        kv_most_bytes=limit if config.kv_cache_bytes is not None else most_kv_bytes(free),
        free_bytes=free,
        contexts=tuple(
            ContextPlan(each.context_length, each.request_bytes, blocks // max(each.request_bytes, 1)) for each in sizes
        ),
        beside_bytes=config.beside.fixed_bytes,
        state_bytes=states.row_bytes,
        num_snapshots=num_snapshots,
        snapshot_bytes=num_snapshots * states.slot_bytes,
        num_host_snapshots=on_host,
        host_snapshot_bytes=on_host * states.slot_bytes,
    )


def plan_ranks(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, free_bytes: int | None = None,
    others: OtherModels = NO_OTHERS,
) -> MemoryPlan:  # fmt: skip
    """What all ranks of a model take together; raises as `plan_memory` and `shard`."""
    check_kv_bytes(config.kv_cache_bytes, memory_bytes() if free_bytes is None else None)
    free, ranks = free_memory_bytes() if free_bytes is None else free_bytes, config.tensor_parallel
    own = _divided(config)
    plan = plan_of_ranks([_plan_rank(spec, checkpoint, own, others, rank, free // ranks) for rank in range(ranks)])
    exchanged = slot_bytes(_exchanged_floats(spec, config, others), ranks)
    return replace(plan, workspace_bytes=plan.workspace_bytes + exchanged, free_bytes=free)


def rank_config(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
) -> tuple[int, ResolvedConfig]:
    """float32 of a slot in the memory that the ranks of a whole model share, and the configuration of each rank.

    It has a part of the threads, and a KV cache of the same size. Raises as `plan_memory` and `shard`.
    """
    check_kv_bytes(config.kv_cache_bytes, memory_bytes())
    own = _divided(config)
    if own.kv_cache_bytes is None:
        plan = _plan_rank(spec, checkpoint, own, others, 0, free_memory_bytes() // config.tensor_parallel)
        own = replace(own, kv_cache_bytes=plan.kv_limit_bytes)
    return _exchanged_floats(spec, config, others), own


def _plan_rank(
    spec: ModelSpec, checkpoint: Checkpoint, own: ResolvedConfig, others: OtherModels, rank: int, free_bytes: int
) -> MemoryPlan:
    """Of a rank, whose configuration is `own` but for what drafts beside it."""
    ranks = own.tensor_parallel
    part, beside = shard(spec, rank, ranks, checkpoint), parts_of(others, rank, ranks)
    if (drafter := find_drafter(beside, part, own)) is not None:
        own = shared_with(own, drafter.spec, beside_drafter(drafter, part, checkpoint, own))
    return plan_memory(part, checkpoint, own, free_bytes)


def _divided(config: ResolvedConfig) -> ResolvedConfig:
    return replace(config.cache_of_rank(), threads=max(1, config.threads // config.tensor_parallel))


def _exchanged_floats(spec: ModelSpec, config: ResolvedConfig, others: OtherModels = NO_OTHERS) -> int:
    """float32 of the largest exchange of a rank: the stream of a step, or its logits."""
    ids = -(-spec.vocab_size // config.tensor_parallel)
    beside = [_exchanged_floats(each.spec, drafter_config(config, each.spec)) for each in others.values()]
    return max(config.max_step_tokens * spec.hidden_size, most_selected(spec.vocab_size) * ids, *beside)


def beside_drafter(drafter: ModelSource, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig) -> Beside:
    """What a drafter takes beside the main model. Raises what `plan_memory` does."""
    own = drafter_config(config, drafter.spec)
    lent = Weights(spec, checkpoint, select(config.instruction_set).lanes, config.threads)
    lent.reserve(spec.matrices(), no_bytes)
    plan, sizes = plan_memory(drafter.spec, drafter.checkpoint, own, lent=lent), KVSizes(drafter.spec, own)
    return drafter_bytes(plan, sizes.block_bytes, drafter.spec, spec, config)

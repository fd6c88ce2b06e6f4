"""Planned memory of a model on an NVIDIA GPU, from its header alone; no GPU is needed.

Weights, KV cache and workspace are the backend's own, made on torch's `meta` device, which takes no memory: matrices in
fragment order, as cards from Hopper on have them. What is not known before kernels are chosen is estimated: partial
sums of matmuls, inputs of matmuls, graphs. What torch and the driver take for themselves stays out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from realizar.backends.base import NO_OTHERS, ModelSource, OtherModels
from realizar.backends.cuda.attention.kv_memory import KVMemory, kv_limit_bytes
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import MAX_PARTS, chunk_parts, compute_type, fixed_parts, tile_tokens
from realizar.backends.cuda.layouts.activations import padded_cols
from realizar.backends.cuda.matmul.experts import expert_floats
from realizar.backends.cuda.matmul.fp8 import decoded_bytes, least_pairs
from realizar.backends.cuda.matmul.grouped_tiles import step_tiles
from realizar.backends.cuda.matmul.tuning_table import ExpertShape
from realizar.backends.cuda.ranks.sums import sums_bytes
from realizar.backends.cuda.recurrences.memory import slot_bytes
from realizar.backends.cuda.recurrences.scans import scan_scratch
from realizar.backends.cuda.sampling import native_buffers
from realizar.backends.cuda.sampling.native_graphs import num_graphs
from realizar.backends.cuda.shapes import aside_sizes, chunk_kinds, row_counts, step_sizes
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.cuda.supported import SUPPORTED
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.load import Weights, same_embedding, stacks_shared
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.draft_model import drafter_bytes, drafter_config
from realizar.backends.kv_blocks import host_snapshots_within, most_requests, snapshots_within
from realizar.backends.memory_plan import ContextPlan, MemoryPlan, plan_of_ranks, planned_lengths
from realizar.backends.program import Program, build_program
from realizar.backends.resolved_config import Beside, ResolvedConfig
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec

_EVERYTHING = 1 << 60  # bytes: no limit
_DEVICE = DeviceProfile(torch.device("meta"), "planned", (9, 0), 1, _EVERYTHING)
_GRAPH, _GRAPH_LAYER = 140_000, 80_000  # bytes of a graph on an H200, and of a layer in one: 74 of a 1B take 105 MB
_MOST_LONG = 8  # decodes at which a step has another graph where contexts are long


def plan_memory(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, free: int, *, has_embedding: bool = True
) -> MemoryPlan:
    """Sizes of a model, without reading its weights, to plan for `free` bytes; `has_embedding` false borrows it.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape.
        UnsupportedModelError: the CUDA backend does not run a part of the model, or a tensor's type.
        CapacityError: the block size does not suit a GPU.
    """
    SUPPORTED.check(spec)
    check_tensors(spec, checkpoint)
    program = build_program(spec, config.hidden_layers)
    weights = Weights(spec, program, checkpoint, _DEVICE, packs_floats=True, stacks_shared=stacks_shared(config))
    weights.load(weights.apart(program.matmuls()), lambda _size: None)
    weight_bytes, embedding = weights.size_bytes, has_embedding * WeightTensors(spec, checkpoint).table_bytes
    compute = compute_type(config.kv_dtype, is_gpu=True)
    sizes = step_sizes(spec, config, tile_tokens(spec, config.kv_dtype, _DEVICE, config.batch_invariant))
    parts = config.max_running * fixed_parts(config.context_length) if config.batch_invariant else MAX_PARTS
    parts = max(parts, chunk_parts(spec, config.kv_dtype, _DEVICE, config.batch_invariant))
    workspace = Workspace(spec, sizes, _DEVICE, compute, parts)
    workspace_bytes = workspace.size_bytes + _recurrence_bytes(spec, config, workspace)
    workspace_bytes += _decoded_bytes(weights, program, sizes.tokens) if config.prompt_dtype == "fp8" else 0
    workspace_bytes += _aside_bytes(spec, config, workspace, parts) + sums_bytes(spec, sizes.tokens, sizes.selected)
    graphs = graph_bytes(len(spec.layers), sizes) if config.graphs else 0
    reserved = _sampling_bytes(spec, config, sizes) + _estimated_bytes(spec, sizes) + graphs
    fixed = weight_bytes + embedding + workspace_bytes + reserved + config.beside.fixed_bytes
    alone, limit = _of_one_request(config), kv_limit_bytes(config, max(free - fixed, 0))
    caches = {
        length: KVMemory(spec, replace(alone, context_length=length), _DEVICE)
        for length in planned_lengths(config.context_length)
    }
    token_bytes, state = _token_bytes(spec, alone), slot_bytes(spec, config)
    kept = state if config.prefix_cache else 0
    snapshots = snapshots_within(limit, caches[config.context_length].joint_bytes, kept, token_bytes)
    blocks = limit - snapshots * state
    most = min(float(blocks), most_requests(config) * caches[config.context_length].joint_bytes)
    on_host = host_snapshots_within(config, kept, snapshots, most / max(token_bytes, 1))
    return MemoryPlan(
        device="cuda",
        weight_bytes=weight_bytes,
        embedding_bytes=embedding,
        workspace_bytes=workspace_bytes,
        kv_dtype=config.kv_dtype,
        kv_bytes_per_token=token_bytes,
        kv_limit_bytes=limit,
        free_bytes=free,
        contexts=_contexts(caches, blocks),
        beside_bytes=config.beside.fixed_bytes,
        beside_reserved_bytes=config.beside.reserved_bytes,
        token_weight_bytes=weights.token_bytes,
        reserved_bytes=reserved,
        graph_bytes=graphs,
        state_bytes=state,
        num_snapshots=snapshots,
        snapshot_bytes=snapshots * state,
        num_host_snapshots=on_host,
        host_snapshot_bytes=on_host * state,
    )


def rank_config(
    _spec: ModelSpec, _checkpoint: Checkpoint, config: ResolvedConfig, _others: OtherModels = NO_OTHERS
) -> tuple[int, ResolvedConfig]:
    """No memory of the host for sums, and the configuration of each rank, but for its device."""
    return 0, replace(config.cache_of_rank(), host_sharers=config.host_sharers * config.tensor_parallel)


def plan_ranks(spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, free: int) -> MemoryPlan:
    """What all ranks of a model take together, with `free` bytes on the GPU of each; raises as `plan_memory` and
    `shard`.
    """
    ranks, (_, own) = config.tensor_parallel, rank_config(spec, checkpoint, config)
    parts = [shard(spec, rank, ranks, checkpoint) for rank in range(ranks)]
    return plan_of_ranks([plan_memory(part, checkpoint, own, free) for part in parts])


def _contexts(caches: Mapping[int, KVMemory], blocks: int) -> tuple[ContextPlan, ...]:
    """Of each length, what a request takes, and how many fit into so many bytes; an assistant takes none."""
    sizes = {length: cache.joint_bytes for length, cache in caches.items()}
    return tuple(ContextPlan(length, size, blocks // max(size, 1)) for length, size in sizes.items())


def beside_drafter(drafter: ModelSource, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig) -> Beside:
    """What a drafter takes beside the main model. Raises what `plan_memory` does."""
    own, borrows = drafter_config(config, drafter.spec), same_embedding(ModelSource(spec, checkpoint), drafter)
    plan = plan_memory(drafter.spec, drafter.checkpoint, own, _EVERYTHING, has_embedding=not borrows)
    cache = KVMemory(drafter.spec, _of_one_request(own), _DEVICE)
    return drafter_bytes(plan, cache.block_bytes, drafter.spec, spec, config)


def _of_one_request(config: ResolvedConfig) -> ResolvedConfig:
    return replace(config, max_running=1, prefix_cache=False, kv_cache_bytes=_EVERYTHING)


def _token_bytes(spec: ModelSpec, config: ResolvedConfig) -> float:
    two_blocks = KVMemory(spec, replace(config, context_length=config.block_size), _DEVICE)  # a block, and one spare
    return two_blocks.joint_bytes / (2 * config.block_size)


def _recurrence_bytes(spec: ModelSpec, config: ResolvedConfig, workspace: Workspace) -> int:
    """Bytes of the states of all rows, and of what the kernels of a recurrence hand on."""
    handed_on = 0 if config.batch_invariant else scan_scratch(spec, workspace, _DEVICE).size_bytes
    return config.max_running * slot_bytes(spec, config) + handed_on


def _aside_bytes(spec: ModelSpec, config: ResolvedConfig, workspace: Workspace, parts: int) -> int:
    """Bytes of what chunks that are read aside leave for each other's launches."""
    sizes = aside_sizes(spec, config, workspace.arrays.sizes, _DEVICE)
    if sizes is None:
        return 0
    return Workspace(spec, sizes, _DEVICE, workspace.query.dtype, parts).size_bytes + _estimated_bytes(spec, sizes)


def _decoded_bytes(weights: Weights, program: Program, tokens: int) -> int:
    """Bytes of the weights that a matmul of a long step decodes to 8-bit floats, with experts where they are."""
    keys = [tuple(linear.weight for linear in group) for group in weights.apart(program.block_matmuls())]
    launches = [weights.groups[key] for key in keys]
    mixtures = list(weights.experts.values())
    pairs = least_pairs([stack for one in mixtures for stack in one.stacks if isinstance(stack, PackedExperts)])
    for one in mixtures:
        experts = one.experts
        step = step_tiles(tokens, experts.experts_per_token, ExpertShape.of(experts), True, fp8_pairs=pairs)
        launches += [(stack,) for stack in one.stacks if step.in_fp8]
    packed = ([one for one in each if isinstance(one, PackedMatrix)] for each in launches)
    return max(map(decoded_bytes, packed), default=0)


def _sampling_bytes(spec: ModelSpec, config: ResolvedConfig, sizes: StepSizes) -> int:
    vocab = spec.vocab_size
    fixed = native_buffers.fixed_bytes(sizes.selected, vocab)
    return fixed + native_buffers.reserved_bytes(sizes.selected, config.max_running, vocab, config.context_length)


def _pair_floats(spec: ModelSpec, sizes: StepSizes) -> int:
    shared = any(one.shared is not None for _, one in spec.mixtures())
    return expert_floats(spec, sizes.tokens) + (sizes.tokens * spec.hidden_size if shared else 0)


def _estimated_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    attention = max(one.num_heads * one.head_size for _, one in spec.all_attentions())
    shared = [one.shared for _, one in spec.mixtures() if one.shared is not None]
    widest = max((one.up.out_features for one in (*(one for _, one in spec.feed_forwards()), *shared)), default=0)
    pairs = 0
    for _, one in spec.mixtures():
        shared_one = one.shared is not None
        step = step_tiles(sizes.tokens, one.experts_per_token, ExpertShape.of(one), True, shared=shared_one)
        laid = padded_cols(one.down.out_features)  # rows in tiles, on Hopper
        pairs = max(pairs, step.places * (one.down.in_features + laid) // 2)
    own = 0 if spec.layer_inputs is None else spec.layer_inputs.projection.out_features
    partials = max(sizes.tokens * max(2 * widest, own), sizes.selected * spec.vocab_size, _pair_floats(spec, sizes))
    routers = sum(
        3 * one.router.out_features * one.router.in_features for _, one in spec.mixtures()
    )  # in two orders, and as halves
    biases = sum(
        linear.num_experts * linear.out_features
        for _, one in spec.mixtures()
        for linear in one.expert_linears()
        if linear.bias is not None
    )
    streams = 2 if any(one.norms is not None for _, one in spec.mixtures()) else 1  # norms that are kept at once
    inputs = sizes.tokens * (streams * spec.hidden_size + attention + widest) + pairs
    return 4 * (partials + inputs + routers + biases)


def graph_bytes(num_layers: int, sizes: StepSizes) -> int:
    """Bytes of all graphs: of steps of decodes, of chunks, of logits after these, and of the sampler."""
    counts = row_counts(sizes.rows)
    steps = len(counts) + sum(count <= _MOST_LONG for count in counts) + len(chunk_kinds(sizes))
    others = len(row_counts(sizes.selected)) + num_graphs(sizes.rows)
    return steps * (_GRAPH + num_layers * _GRAPH_LAYER) + others * _GRAPH

"""`load_model` puts a model on the device: weights, workspace, kernels, KV cache, launches and graphs. torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Thread

import torch

from realizar.backends.base import FUSED_AT_ONCE, Capacity
from realizar.backends.cuda.attention.bind import AttentionBinder
from realizar.backends.cuda.attention.kv_memory import KVMemory
from realizar.backends.cuda.attention.rope_tables import RopeTables
from realizar.backends.cuda.bind import Binder
from realizar.backends.cuda.bind_dense import DenseBinder
from realizar.backends.cuda.bind_mixture import MixtureBinder, shared_floats
from realizar.backends.cuda.capture import failure_of, stream_of_most
from realizar.backends.cuda.device import DeviceProfile, check_compared, describe_card, describe_refused, free_bytes
from realizar.backends.cuda.device_errors import translate
from realizar.backends.cuda.finish import StepFinisher
from realizar.backends.cuda.graphs import AsideReader, GraphRunner, SmallGraphs, tail_kind
from realizar.backends.cuda.inputs.draft_chain import DraftChain
from realizar.backends.cuda.kernel_sizes import attention_parts, compute_type, tile_tokens
from realizar.backends.cuda.kernels.ahead import PlannedCompiles
from realizar.backends.cuda.kernels.launched import begin_hashing
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.experts import ExpertMatmuls, expert_floats
from realizar.backends.cuda.matmul.fp8 import as_device_multiplies, least_pairs
from realizar.backends.cuda.matmul.grouped import GroupedExperts
from realizar.backends.cuda.matmul.linears import MergedLinear, Merger, describe_routes, distinct, partial_floats
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.routing import ExpertsRead, RouterKernels, score_tile
from realizar.backends.cuda.native.compiler import is_compiling
from realizar.backends.cuda.norms import NormBinder
from realizar.backends.cuda.plan import plan_memory
from realizar.backends.cuda.ranks.sums import RankGroup, RankSums, make_sums
from realizar.backends.cuda.recurrences.bind import RecurrenceBinder
from realizar.backends.cuda.recurrences.memory import StateMemory, slot_bytes
from realizar.backends.cuda.recurrences.rows import RecurringRows
from realizar.backends.cuda.recurrences.scans import ScanScratch, scan_scratch
from realizar.backends.cuda.sampling.make import make_sampler
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.step_sampler import StepSampler
from realizar.backends.cuda.shapes import (
    FIRST_ROWS,
    aside_sizes,
    chunk_kinds,
    first_chunks,
    fused_tokens,
    mixed_kinds,
    row_counts,
    step_sizes,
    token_counts,
)
from realizar.backends.cuda.sleep.load_memory import LoadMemory
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.load import Weights, stacks_shared
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.load_progress import LoadProgress, no_progress, report_weights
from realizar.backends.loaded_capacity import loaded_capacity
from realizar.backends.program import Program, build_program
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CaptureLostError, DeviceLostError, KernelError
from realizar.models.parts import BlockInputs, Linear
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
_LEFT_PROCESSORS = 16  # multiprocessors that a chunk which is read aside leaves to steps


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on the device, and all that its steps use. The memory is free again when this is closed and dropped.

    Attributes:
        weights: packed.
        states: of layers that keep one. recurring: how far each row's state is.
        sampler: the rows' parameters and states.
        attention: chooses the launches of attention by the kind of a step.
        graphs: launches of a step, captured or one by one.
        aside: reads chunks of prompts beside steps; None where that is not done.
        finisher: sampled tokens, log-probabilities and pooled vectors at the end of a step.
        experts_read: counts of the experts that steps read.
        ropes: tables of the rope, of whose rows a step fills some.
        fusion: launches that make a drafter's states of its model's streams; none where it reads none.
        injection: launches that write keys and values of such states; none where the drafter's layers write theirs.
        chain: of a drafter that goes on from its drafts.
    """

    spec: ModelSpec
    config: ResolvedConfig
    weights: Weights
    space: Workspace
    kv: KVMemory
    states: StateMemory
    recurring: RecurringRows
    sampler: StepSampler
    attention: AttentionBinder
    graphs: GraphRunner
    aside: AsideReader | None
    finisher: StepFinisher
    experts_read: ExpertsRead
    ropes: RopeTables
    fusion: SmallGraphs
    injection: SmallGraphs
    chain: DraftChain | None
    load_s: float

    @property
    def capacity(self) -> Capacity:
        capacity = loaded_capacity(
            self.config, self.kv, self.weights.size_bytes, self.load_s, self.weights.token_bytes,
            tuple(token_counts(self.space.arrays.sizes.tokens)),
        )  # fmt: skip
        return replace(capacity, aside_tokens=0 if self.aside is None else self.aside.tokens)

    def close(self) -> None:
        """Free the graphs, and threads and memory of the host: none is that of tensors."""
        for graphs in (self.graphs, self.fusion, self.injection):
            graphs.close()
        if self.chain is not None:
            self.chain.release()
        if self.aside is not None:
            self.aside.close()
        self.sampler.release()
        self.states.close()


@dataclass(frozen=True, slots=True)
class _Matmuls:
    """Matmuls of layers and of the logits, one of each kind, and the padded numbers of tokens that either may have."""

    kernels: MatmulKernels | None
    layers: list[MergedLinear]
    head: list[MergedLinear]
    counts: set[int]
    head_counts: set[int]

    @property
    def all(self) -> list[MergedLinear]:
        return self.layers + self.head

    @property
    def partial_floats(self) -> int:
        return max(partial_floats(self.layers, self.counts), partial_floats(self.head, self.head_counts))


@dataclass(frozen=True, slots=True)
class _Lane:
    """What the launches of a step leave for each other, and matmuls for its device: steps at once have one each.

    `device` has as many multiprocessors as there are for them; those of `stream`, or all.
    """

    device: DeviceProfile
    space: Workspace
    merger: Merger
    matmuls: _Matmuls
    grouped: GroupedExperts | None
    stream: torch.cuda.Stream | None = None


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is loaded before the KV cache, and what threads compile meanwhile.

    `scales` are those of keys and values, as `KVMemory` takes them.
    """

    program: Program
    weights: Weights
    space: Workspace
    ropes: RopeTables
    merger: Merger
    matmuls: _Matmuls
    experts: ExpertMatmuls
    scales: Mapping[int, Sequence[torch.Tensor]]
    compiles: PlannedCompiles

    def mixture_kernels(self, lane: _Lane, tokens: int) -> tuple[object, ...]:
        """What Triton's kernels of mixtures are compiled for in a step of so many tokens."""
        if lane.grouped is None:
            return ()
        mixtures = (each for each in self.weights.experts.values() if each.ends_with_activation)
        formats = dict.fromkeys(lane.grouped.input_format(each, tokens) for each in mixtures)
        return *formats, *score_tile(tokens).items()


def load_model(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile, progress: LoadProgress,
    memory: LoadMemory, *, gives_states: bool = False, beside: LoadedModel | None = None,
    ranks: RankGroup | None = None, defers: bool = False, compared: Callable[[], DeviceProfile] | None = None,
) -> LoadedModel:  # fmt: skip
    """Load a model whose parts run on a GPU, with all kernels compiled and graphs captured that steps can need.

    Args:
        progress: gets what is being done, and the share done, 0 to 1. memory: of tensors; graphs take theirs beside it.
        gives_states: each step leaves the final states of its selected tokens in `Workspace.final_states`.
        beside: a model that outlives this one, whose embedding is taken where it is the same, and whose keys and values
            are where a drafter reads these. ranks: of a rank's part.
        defers: most graphs, and what Triton compiles for their kinds, are left to `GraphRunner.prepare_next`.
        compared: waits, before caches, for what others find of the device: WrongKernelsError where kernels are wrong.

    Raises:
        UnsupportedModelError: the GPU can't do what is configured.
        KernelError: a kernel does not compile, or the GPU refuses it.
        CheckpointError: a weight is not finite.
        CapacityError: it does not fit.
    """
    start_s = time.perf_counter()
    config = _begin(spec, checkpoint, config, device, is_compared=compared is not None)
    with memory.kept():
        parts = _load_parts(spec, checkpoint, config, device, progress, beside)
        sampler, reserved = make_sampler(spec, config, device, parts.space, progress)
        lane = _make_lane(spec, config, parts, device, parts.space, parts.merger, parts.matmuls)
        of_aside = _make_aside_lane(spec, config, parts, device, progress)
        sums = make_sums(ranks, spec, config, lane.space.arrays.sizes, device.torch_device)
    check_compared(device, compared)
    with memory.emptied():
        scratch = _make_scratch(spec, config, parts, device)
        kv, states = _make_caches(spec, config, parts, reserved, device, beside, ranks)
    weights, space = parts.weights, parts.space
    with memory.kept():
        recurrences = RecurrenceBinder(weights, space, states, device, scratch)
        attention, binder = _binders(spec, config, parts, lane, kv, recurrences, sums)
        sizes, recurring = space.arrays.sizes, _recurring_rows(config, space, states)
        tail = binder.bind_tail(parts.program.tail, gives_states=gives_states)
        graphs = GraphRunner(binder.bind_body(parts.program), tail, space, device, compiles=parts.compiles)
        fusion, injection = _bind_states(spec, parts.program, binder)
        decodes = _decode_kinds(space, attention, config.context_length)
        recurrences.prepare()
        attention.prepare([*decodes, *mixed_kinds(sizes)])
        finisher = StepFinisher(space, graphs, binder.bind_final_norm(parts.program.tail), sampler)
        _log_decisions(device, space, kv, parts.matmuls)
        if device.is_gpu:
            chunks = _distinct_chunks(lane, attention, parts, no_progress if defers else progress)
            left = _warm_up(space, graphs, finisher, config, chunks, defers=defers)
            _prepare_states(fusion, injection, sizes, device, capture=config.graphs)
        aside = None if of_aside is None else _bind_aside(spec, config, parts, of_aside, kv, recurrences)
    if device.is_gpu:
        kinds = [*decodes, *map(tail_kind, row_counts(sizes.selected)), *chunk_kinds(sizes)]
        _capture(graphs, sampler, kinds, left, config.graphs, progress)
        aside = None if aside is None else _prepared(aside)
    chain = None if beside is None else _make_chain(spec, config, space, device, beside)
    return LoadedModel(
        spec, config, weights, space, kv, states, recurring, sampler, attention, graphs, aside,
        finisher, parts.experts.experts_read, parts.ropes, fusion, injection, chain, time.perf_counter() - start_s,
    )  # fmt: skip


def _begin(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile, *, is_compared: bool
) -> ResolvedConfig:
    """The configuration as the device runs it; CapacityError where weights do not fit. What takes longest is begun.

    Where a process compares the device meanwhile, that one has the sampler compiled first of all, and leaves it here.
    """
    config = as_device_multiplies(config, device)
    if device.is_gpu:
        plan_memory(spec, checkpoint, config, free_bytes(device)).check_weights_fit()
        begin_hashing()
    if device.runs("sampling") and not is_compared:
        SamplingKernels.begin(device.torch_device)
    return config


def _make_caches(
    spec: ModelSpec, config: ResolvedConfig, parts: _Parts, reserved_bytes: int, device: DeviceProfile,
    beside: LoadedModel | None, ranks: RankGroup | None,
) -> tuple[KVMemory, StateMemory]:  # fmt: skip
    free = None if ranks is None else ranks.least(free_bytes(device))  # all have the same blocks
    lent, of_states = None if beside is None else beside.kv, slot_bytes(spec, config)
    kv = KVMemory(spec, config, device, reserved_bytes, of_states, parts.scales, free, lent)
    states = StateMemory(spec, config, device.torch_device, kv.num_snapshots, kv.num_host_snapshots)
    kv.num_host_snapshots = states.num_host_snapshots
    return kv, states


def _bind_states(spec: ModelSpec, program: Program, binder: Binder) -> tuple[SmallGraphs, SmallGraphs]:
    """What makes a drafter's states of its model's streams, and keys and values of these."""
    fusion = [] if program.fusion is None else binder.bind_fusion(program.fusion)
    is_block = isinstance(spec.next_token, BlockInputs)
    return SmallGraphs(fusion), SmallGraphs(binder.bind_injection(program) if is_block else [])


def _make_chain(
    spec: ModelSpec, config: ResolvedConfig, space: Workspace, device: DeviceProfile, beside: LoadedModel
) -> DraftChain | None:
    """None for a drafter of blocks, which goes on from no draft."""
    if isinstance(spec.next_token, BlockInputs):
        return None
    chain = DraftChain(spec, space, device, config.block_size, beside.space.arrays.drafts, beside.spec.vocab_size)
    chain.prepare(capture=config.graphs)
    return chain


def _recurring_rows(config: ResolvedConfig, space: Workspace, states: StateMemory) -> RecurringRows:
    scans = not config.batch_invariant
    recurring = RecurringRows(space.arrays.sizes, states.ring, 1 + config.speculative_tokens, scans=scans)
    if states.rings:
        space.arrays.fill_recurrences = recurring.fill
    return recurring


def _binders(
    spec: ModelSpec, config: ResolvedConfig, parts: _Parts, lane: _Lane, kv: KVMemory, recurrences: RecurrenceBinder,
    sums: RankSums | None = None,
) -> tuple[AttentionBinder, Binder]:  # fmt: skip
    """What binds the launches of a lane's steps."""
    weights, space, device, kernels = parts.weights, lane.space, lane.device, lane.matmuls.kernels
    attention = AttentionBinder(
        weights, space, kv, parts.ropes, device, config.context_length, config.batch_invariant, sums
    )  # fmt: skip
    routers = None if kernels is None else RouterKernels(kernels)
    norms, dense = NormBinder(spec, weights, space, sums), DenseBinder(space)
    experts = MixtureBinder(weights, space, lane.merger, parts.experts, routers, lane.grouped, norms, dense)
    binder = Binder(spec, weights, space, attention, lane.merger, experts, recurrences, norms, dense, sums)
    return attention, binder


def _bind_aside(
    spec: ModelSpec, config: ResolvedConfig, parts: _Parts, lane: _Lane, kv: KVMemory, recurrences: RecurrenceBinder
) -> AsideReader:
    assert lane.stream is not None
    attention, binder = _binders(spec, config, parts, lane, kv, recurrences)
    graphs = GraphRunner(binder.bind_body(parts.program), (), lane.space, lane.device, lane.stream)
    attention.prepare([])
    return AsideReader(graphs, lane.space, lane.stream)


def _prepared(aside: AsideReader) -> AsideReader | None:
    """The reader with its graph; None where the device refuses its stream, which a warning says."""
    try:
        aside.prepare()
    except Exception as error:  # noqa: BLE001 - raised again where the device failed
        _LOG.warning("prompts are not read beside steps: %s", failure_of(error))
        aside.close()
        return None
    return aside


def _load_parts(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile, progress: LoadProgress,
    beside: LoadedModel | None,
) -> _Parts:  # fmt: skip
    lent = None if beside is None else beside.weights
    program = build_program(spec, config.hidden_layers)
    scales = {
        layer: [torch.tensor([scale], device=device.torch_device) for scale in pair]
        for layer, pair in WeightTensors(spec, checkpoint).cache_scales(config.kv_dtype).items()
    }
    kernels = None
    if device.runs("matmuls"):
        kernels = MatmulKernels(device.torch_device, config.batch_invariant, device.without)
    weights = _make_weights(spec, checkpoint, config, device, program, kernels, lent)
    compiles = PlannedCompiles()
    if kernels is not None and device.is_gpu:
        Thread(target=_compile_ahead, args=(spec, checkpoint, config, device, kernels, compiles)).start()
    else:
        compiles.end()
    try:
        weights.load(_all_matmuls(weights, program), report_weights(checkpoint.size_bytes, progress))
    except BaseException:
        compiles.close()
        raise
    compiles.may_begin.set()
    parts = _make_parts(spec, config, device, program, weights, kernels, scales, progress, compiles)
    if kernels is not None:
        kernels.expect_decoded(max(linear.decoded_bytes for linear in parts.matmuls.all))
    return parts


def _all_matmuls(weights: Weights, program: Program) -> list[tuple[Linear, ...]]:
    return weights.apart(program.block_matmuls()) + program.tail.matmuls()


def _make_weights(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile, program: Program,
    kernels: MatmulKernels | None, lent: Weights | None = None,
) -> Weights:  # fmt: skip
    packs_floats = kernels is not None and kernels.packs_floats
    return Weights(spec, program, checkpoint, device, packs_floats, stacks_shared(config), lent)


def _make_parts(
    spec: ModelSpec, config: ResolvedConfig, device: DeviceProfile, program: Program, weights: Weights,
    kernels: MatmulKernels | None, scales: Mapping[int, Sequence[torch.Tensor]], progress: LoadProgress,
    compiles: PlannedCompiles,
) -> _Parts:  # fmt: skip
    """What follows from weights, with matmuls compiled."""
    sizes = step_sizes(spec, config, tile_tokens(spec, config.kv_dtype, device, config.batch_invariant))
    space = _make_workspace(spec, config, sizes, device)
    ropes = RopeTables(spec, config.context_length, device.torch_device, sizes.tokens)
    merger = Merger(program, weights, device, kernels, config.batch_invariant, config.prompt_dtype == "fp8")
    body, tail = weights.apart(program.block_matmuls()), program.tail.matmuls()
    layers, head = (distinct(map(merger.merge, part)) for part in (body, tail))
    rows = row_counts(sizes.rows)
    counts, head_counts = {*rows, *token_counts(sizes.tokens)}, {*rows, *row_counts(sizes.selected)}
    matmuls = _Matmuls(kernels, layers, head, counts, head_counts)
    _compile(matmuls, progress)
    expert_matmuls = ExpertMatmuls(kernels)
    expert_matmuls.prepare(list(weights.experts.values()))
    return _Parts(program, weights, space, ropes, merger, matmuls, expert_matmuls, scales, compiles)


def _compile_ahead(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile, kernels: MatmulKernels,
    compiles: PlannedCompiles,
) -> None:  # fmt: skip
    """Have others compile what a load will ask for, while it reads weights: the header says what.

    Triton's kernels follow once weights are read, as both would wait for each other, and where CUDA C++ was missing:
    else an earlier start has compiled them. What fails here fails in the load, too, which says so.
    """
    try:
        device, kernels = replace(device, torch_device=torch.device("meta")), kernels.planned()
        program = build_program(spec, config.hidden_layers)
        weights = _make_weights(spec, checkpoint, config, device, program, kernels)
        weights.load(_all_matmuls(weights, program), lambda _size: None)
        weights.embedding = torch.empty(0, device=device.torch_device)
        alone = replace(config, max_running=1, prefix_cache=False, kv_cache_bytes=1 << 60)
        kv = KVMemory(spec, alone, device)
        states = StateMemory(spec, alone, device.torch_device)
        parts = _make_parts(spec, config, device, program, weights, kernels, {}, no_progress, compiles)
        lane = _make_lane(spec, config, parts, device, parts.space, parts.merger, parts.matmuls)
        recurrences = RecurrenceBinder(weights, parts.space, states, device, _make_scratch(spec, config, parts, device))
        attention, binder = _binders(spec, config, parts, lane, kv, recurrences)
        body, sizes = binder.bind_body(program), parts.space.arrays.sizes
        recurrences.prepare()
        decodes = _decode_kinds(parts.space, attention, config.context_length)
        attention.prepare([*decodes, *mixed_kinds(sizes)])
        if not (is_compiling() and compiles.await_begin()):
            return
        tail = binder.bind_tail(program.tail, gives_states=False)
        tails = [tail_kind(rows) for rows in row_counts(sizes.selected)]
        few = [kind for kind in decodes if kind.tokens <= FIRST_ROWS]
        first = [*((kind, body) for kind in [*first_chunks(sizes), *few]), *((kind, tail) for kind in tails)]
        others = [*decodes, *_distinct_chunks(lane, attention, parts, no_progress)]
        compiles.plan([*first, *((kind, body) for kind in others)], whole=len(first))
    except Exception as error:  # noqa: BLE001 - see above
        _LOG.debug("kernels are not compiled ahead: %s", error)
    finally:
        compiles.end()


def _make_scratch(spec: ModelSpec, config: ResolvedConfig, parts: _Parts, device: DeviceProfile) -> ScanScratch | None:
    """Make memory that no step reads from another one: of decoded weights, and of scans, which is returned."""
    if parts.matmuls.kernels is not None:
        parts.matmuls.kernels.decoded()
    return None if config.batch_invariant else scan_scratch(spec, parts.space, device)


def _make_lane(
    spec: ModelSpec, config: ResolvedConfig, parts: _Parts, device: DeviceProfile, space: Workspace, merger: Merger,
    matmuls: _Matmuls, stream: torch.cuda.Stream | None = None,
) -> _Lane:  # fmt: skip
    """A lane of steps of the numbers of tokens of `matmuls`, with grouped matmuls compiled."""
    kernels, counts, mixtures = matmuls.kernels, matmuls.counts, list(parts.weights.experts.values())
    grouped, most = None, space.arrays.sizes.tokens
    if kernels is not None and mixtures:
        stacks = [stack for one in mixtures for stack in one.stacks if isinstance(stack, PackedExperts)]
        pairs = least_pairs(stacks) if config.prompt_dtype == "fp8" else 0
        grouped = GroupedExperts(kernels, parts.experts, most, pairs)
        grouped.prepare(mixtures, counts)
    pair_floats = expert_floats(spec, most) + shared_floats(spec, parts.weights, merger, counts)
    space.size_partials(max(matmuls.partial_floats, pair_floats))
    return _Lane(device, space, merger, matmuls, grouped, stream)


def _make_aside_lane(
    spec: ModelSpec, config: ResolvedConfig, parts: _Parts, device: DeviceProfile, progress: LoadProgress
) -> _Lane | None:
    """The lane of chunks that are read aside; None where none is, which a line says if the driver is the reason."""
    sizes = aside_sizes(spec, config, parts.space.arrays.sizes, device)
    if sizes is None:
        return None
    try:
        stream, processors = stream_of_most(device.torch_device, _LEFT_PROCESSORS)
    except (KernelError, RuntimeError) as error:  # the latter of a driver that has no green contexts
        _LOG.info("prompts are not read beside steps: %s", error)
        return None
    device = replace(device, processors=processors)
    kernels = MatmulKernels(device.torch_device, without=device.without, processors=processors)
    merger = Merger(parts.program, parts.weights, device, kernels)
    layers = distinct(map(merger.merge, parts.weights.apart(parts.program.block_matmuls())))
    matmuls = _Matmuls(kernels, layers, [], {sizes.tokens}, set())
    _compile(matmuls, progress)
    space = _make_workspace(spec, config, sizes, device)
    return _make_lane(spec, config, parts, device, space, merger, matmuls, stream)


def _make_workspace(spec: ModelSpec, config: ResolvedConfig, sizes: StepSizes, device: DeviceProfile) -> Workspace:
    compute = compute_type(config.kv_dtype, is_gpu=device.torch_device.type != "cpu")
    rows = row_counts(sizes.rows)
    parts = attention_parts(spec, rows, config.context_length, device, config.kv_dtype, config.batch_invariant)
    return Workspace(spec, sizes, device, compute, parts)


def _compile(matmuls: _Matmuls, progress: LoadProgress) -> None:
    """Compile the CUDA matmuls of every padded number of tokens, side by side."""
    if matmuls.kernels is None:
        return
    parts = (matmuls.layers, matmuls.counts), (matmuls.head, matmuls.head_counts)
    kinds = [(linear, StepKind(count)) for linears, counts in parts for linear in linears for count in counts]
    wanted = [kernel for linear, kind in kinds for kernel in linear.kernels(kind)]
    matmuls.kernels.prepare(wanted, lambda done, total: progress("compiling matmul kernels", done / max(1, total)))


def _decode_kinds(space: Workspace, attention: AttentionBinder, context_length: int) -> list[StepKind]:
    counts = row_counts(space.arrays.sizes.rows)
    long = [StepKind(rows, rows, 0, True) for rows in counts if attention.is_long(rows, context_length)]
    return [StepKind(rows, rows, 0) for rows in counts] + long


def _log_decisions(device: DeviceProfile, space: Workspace, kv: KVMemory, matmuls: _Matmuls) -> None:
    _LOG.info("%s", describe_card(device, str(space.query.dtype).removeprefix("torch."), kv.dtype))
    if not _LOG.isEnabledFor(logging.DEBUG):
        return
    for line in (*describe_refused(device), *describe_routes(matmuls.all, matmuls.counts)):
        _LOG.debug("%s", line)


def _warm_up(
    space: Workspace, graphs: GraphRunner, finisher: StepFinisher, config: ResolvedConfig,
    chunks: Iterable[StepKind], *, defers: bool,
) -> Iterable[StepKind] | None:  # fmt: skip
    """Run what steps launch beside their graphs. Returns the chunks that are left; None without `defers`."""
    if config.kv_blocks is not None:  # it drafts
        space.arrays.warm_drafts(config.block_size)
    space.arrays.clear()
    for kind in first_chunks(space.arrays.sizes) if defers else chunks:
        graphs.warm(kind)
    counts = [rows for rows in row_counts(space.arrays.sizes.selected) if rows <= FIRST_ROWS or not defers]
    for rows in counts:
        graphs.warm(tail_kind(rows))
    finisher.warm(counts)
    return chunks if defers else None


def _prepare_states(
    fusion: SmallGraphs, injection: SmallGraphs, sizes: StepSizes, device: DeviceProfile, *, capture: bool
) -> None:
    """Compile what makes states of streams, and keys of these, for every number of them."""
    fused = {fused_tokens(count, sizes) for count in range(1, min(sizes.tokens, FUSED_AT_ONCE) + 1)}
    fusion.prepare(fused, device, capture=capture)
    injection.prepare({*row_counts(sizes.rows), *token_counts(sizes.tokens)}, device, capture=capture)


def _capture(
    graphs: GraphRunner, sampler: StepSampler, kinds: Sequence[StepKind], left: Iterable[StepKind] | None,
    capture: bool, progress: LoadProgress,
) -> None:  # fmt: skip
    """Capture the graphs, which are freed again where that fails; without `capture` their steps are compiled alone.

    Raises CaptureLostError where the context is lost meanwhile.
    """
    stage = "capturing graphs" if capture else "compiling steps"
    if left is not None:
        kinds = graphs.leave(kinds, left, capture=capture)
    try:
        graphs.prepare(kinds, lambda share: progress(stage, share), capture=capture)
        if capture:
            sampler.capture()
    except BaseException as error:
        graphs.close()
        ours = translate(error) or error if isinstance(error, Exception) else error
        if capture and isinstance(ours, DeviceLostError):
            raise CaptureLostError(f"{ours} (while graphs were captured: --no-graphs does without)") from error
        raise


def _distinct_chunks(
    lane: _Lane, attention: AttentionBinder, parts: _Parts, progress: LoadProgress
) -> Iterator[StepKind]:
    """A kind of step each that starts other kernels than those before, or compiled for other constants."""
    space, sizes = lane.space, lane.space.arrays.sizes
    yield from (StepKind(tokens, 0, 1, whole=True) for tokens in ({4, sizes.tokens} if sizes.whole else ()))
    seen: set[object] = set()
    of_tokens: dict[int, object] = {}
    kinds = mixed_kinds(sizes)
    for done, kind in enumerate(kinds):
        tokens = kind.tokens
        if tokens not in of_tokens:
            layers = parts.matmuls.layers
            matmuls = tuple((one.input_formats(kind), one.splits(kind), one.is_gated(kind)) for one in layers)
            of_tokens[tokens] = matmuls, tuple(space.launching(kind).items()), parts.mixture_kernels(lane, tokens)
        kernels = of_tokens[tokens], attention.kernels_of(kind)
        if kernels not in seen:
            seen.add(kernels)
            yield kind
        progress("compiling chunks", (done + 1) / len(kinds))

"""`load_model` packs a model for the CPU: weights, KV cache, workspace, and operations bound to compiled kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Capacity
from realizar.backends.cpu.bind import Binder
from realizar.backends.cpu.bind_kv import AttentionBinder, RopeTables
from realizar.backends.cpu.bind_ranks import RankBinder
from realizar.backends.cpu.bind_state import StateBinder
from realizar.backends.cpu.compile_ahead import CompileAhead, begin
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels import normalize as norms
from realizar.backends.cpu.kernels.attention import combine
from realizar.backends.cpu.kernels.attention_segment import scratch_bytes
from realizar.backends.cpu.kv.memory import KVMemory
from realizar.backends.cpu.operations import BoundProgram, kernels_of, make_tables
from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.sampling.kernel import SAMPLING_KERNELS, SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.cpu.state.memory import StateMemory
from realizar.backends.cpu.state.sizes import state_sizes
from realizar.backends.cpu.threads import TEAM_KERNELS, ThreadTeam
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.workspace import Workspace, reserve_workspace
from realizar.backends.load_progress import LoadProgress, report_weights
from realizar.backends.loaded_capacity import loaded_capacity
from realizar.backends.program import build_program
from realizar.backends.rank_memory import RankMemory
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.parts import BlockInputs
from realizar.models.spec import ModelSpec

PARTIAL_FLOATS = 4 << 20  # float32 for segments of attention that different threads compute


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A packed model, and all that its steps use. Its memory is free again when this object is closed and dropped.

    Attributes:
        scratch: uint8 [threads, bytes], of attention. partial: float32 [PARTIAL_FLOATS], segments of split attention.
        body, tail: operations over all tokens of a step, and over the tokens whose logits are wanted.
        final_states: operations over the tokens whose final hidden states are wanted, or what a drafter hands on.
        seeing: the body with what requests bring to be added after the first layers; the body itself without any.
        fusion: operations that make a drafter's states of its model's streams; None where it reads none.
        injection: operations that write keys and values of such states; None where the drafter's layers write theirs.
        rows: parameters and state of the open rows' sampling. sampling: its kernel.
    """

    spec: ModelSpec
    config: ResolvedConfig
    weights: Weights
    kv: KVMemory
    states: StateMemory
    workspace: Workspace
    ropes: RopeTables
    scratch: NDArray[np.uint8]
    partial: NDArray[np.float32]
    body: BoundProgram
    tail: BoundProgram
    final_states: BoundProgram
    seeing: BoundProgram
    fusion: BoundProgram | None
    injection: BoundProgram | None
    team: ThreadTeam
    rows: SamplingRows
    sampling: SamplingKernel
    load_s: float

    @property
    def capacity(self) -> Capacity:
        return loaded_capacity(
            self.config, self.kv, self.weights.size_bytes, self.load_s, token_bytes=self.weights.token_bytes
        )


def begin_compiling(instruction_set: str | None, kv_dtype: str, threads: int) -> None:
    """Compile what nearly all models run, in processes, as long as a model to load is fetched and after.

    UnsupportedModelError: the processor lacks the instruction set.
    """
    library = KernelLibrary(select(instruction_set))
    first = [SAMPLING_KERNELS[0], library.attend(kv_dtype), library.rotate(kv_dtype)]
    begin([*first, *SAMPLING_KERNELS, norms.normalize, combine, norms.select, *TEAM_KERNELS], threads)


def load_model(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, progress: LoadProgress,
    beside: LoadedModel | None = None, ranks: RankMemory | None = None,
) -> LoadedModel:  # fmt: skip
    """Load a model whose parts run on a CPU, with all kernels compiled that its steps can need.

    Args:
        progress: gets what is being done, and the share, 0 to 1.
        beside: a model that stays loaded as long as this one, whose threads it runs on, whose matrices it takes where
            they are the same tensors, and whose keys and values it may read; None starts threads.
        ranks: through which it adds up its sums and those of the other ranks, of a model that is a rank's part.

    Raises:
        CheckpointError: a weight is not finite. CapacityError: the KV cache does not fit.
        InvalidRequestError: a step or the KV cache is configured larger than this machine's memory.
    """
    start_s = time.perf_counter()
    instructions = select(config.instruction_set)
    program = build_program(spec, config.hidden_layers)
    tensors = WeightTensors(spec, checkpoint)
    workspace = reserve_workspace(spec, config, instructions.tile_tokens[0], tensors.widest_ordered())
    lent = None if beside is None else beside.weights
    weights = Weights(spec, checkpoint, instructions.lanes, config.threads, lent)
    scales = tensors.cache_scales(config.kv_dtype)
    kv = KVMemory(spec, config, scales, None if beside is None else beside.kv)
    weights.reserve(spec.matrices())
    ropes = RopeTables(spec, config.max_step_tokens)
    partial = aligned_zeros(PARTIAL_FLOATS, np.float32)
    scratch = _attention_scratch(kv, config.threads)
    kernels = KernelLibrary(instructions)
    attention = AttentionBinder(kernels, weights, workspace, kv, ropes, scratch, partial)
    states = StateMemory(
        state_sizes(spec, config.speculative_tokens), config.max_running, kv.num_snapshots, kv.num_host_snapshots
    )
    state_binder = StateBinder(instructions, kernels, weights, workspace, states)
    turns = workspace.turns if beside is None else beside.workspace.turns
    rank_binder = None if ranks is None else RankBinder(spec, weights, workspace, ranks, turns)
    binder = Binder(instructions, kernels, weights, workspace, attention, state_binder, rank_binder)
    fusion = None if program.fusion is None else binder.bind_fusion(program.fusion)
    injection = binder.bind_injection(program) if isinstance(spec.next_token, BlockInputs) else None
    body = binder.bind_blocks(program)
    seeing = binder.bind_blocks(program, spec.deepstack) if spec.deepstack else body
    programs = (
        body, binder.bind_tail(program.tail), binder.bind_states(program.tail), seeing, fusion, injection,
    )  # fmt: skip
    bound = [each for each in programs if each is not None]
    kernels_of_steps = [*SAMPLING_KERNELS, *kernels_of(bound), *TEAM_KERNELS]
    with CompileAhead(kernels_of_steps, config.threads, lambda what: progress(what, 1.0)):
        weights.load(spec.matrices(), report_weights(checkpoint.size_bytes, progress))
    memory = weights, kv, states, workspace, ropes, scratch, partial
    team = ThreadTeam(config.threads) if beside is None else beside.team
    rows = SamplingRows(config.max_running, spec.vocab_size, config.context_length)
    sampling = SamplingKernel(spec.vocab_size, team)
    make_tables(bound)
    load_s = time.perf_counter() - start_s
    return LoadedModel(spec, config, *memory, *programs, team, rows, sampling, load_s=load_s)


def _attention_scratch(kv: KVMemory, threads: int) -> NDArray[np.uint8]:
    padded = max(layout.padded_head_size for layout in kv.layouts.values())
    stride = -(-scratch_bytes(padded) // 64) * 64
    return aligned_zeros((threads, stride), np.uint8)

"""`CPUBackend`: a model loaded and stepped on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import (
    NO_OTHERS,
    BlocksAhead,
    Capacity,
    CarriedPlaces,
    ForwardInput,
    OtherModels,
    SampledAhead,
    States,
)
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernels.attention_record import (
    SEGMENT,
    STEP_ROWS,
    STEP_SELECTED,
    STEP_SPLIT,
    STEP_TERMS,
    STEP_TOKENS,
    TILE,
)
from realizar.backends.cpu.load import PARTIAL_FLOATS, LoadedModel, load_model
from realizar.backends.cpu.operations import BoundProgram
from realizar.backends.cpu.plan import beside_drafter
from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.sampling.step_sampler import Pooled, StepSampler
from realizar.backends.cpu.supported import SUPPORTED
from realizar.backends.cpu.workspace import added_features, kept_stream
from realizar.backends.draft_model import DraftModel, load_drafter, shared_with
from realizar.backends.load_progress import LoadProgress, no_progress
from realizar.backends.rank_memory import RankMemory
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.row_axes import RowAxes
from realizar.backends.row_faults import finite_vector
from realizar.backends.supported import find_drafter
from realizar.batch import PROPOSED, OpenedRow, StepOutput, StepRows, head_id_table
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import DeviceLostError, RealizarError, StepError
from realizar.models.check_tensors import check_tensors
from realizar.models.spec import ModelSpec
from realizar.outputs import RowError

_LOG = logging.getLogger(__name__)

Tokens: TypeAlias = list[int] | NDArray[np.integer]  # of a step, by their index


class CPUStep:
    """A finished forward pass whose rows are sampled when the result is asked for, or the next step submitted."""

    def __init__(self, backend: CPUBackend, forward_input: ForwardInput) -> None:
        self._backend, self._input = backend, forward_input
        self._masks: dict[int, NDArray[np.uint32]] = {}
        self._output: StepOutput | None = None
        self._failed = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        if self._output is not None:
            raise RuntimeError("masks came after the step's rows were sampled")
        self._masks.update(masks)

    def defer(self, rows: Collection[int]) -> None:
        self._input = replace(self._input, columns=self._input.columns.without_sampling(rows))

    def sample(self) -> None:
        self.result()

    def result(self) -> StepOutput:
        if self._output is None:
            if self._failed:
                raise StepError("the step's rows could not be sampled")
            self._failed = True
            self._output = self._backend.finish(self._input, self._masks)
            self._failed = False
        return self._output


class CPUBackend:
    """The `Backend` of CPUs. `submit` runs the step, having sampled the rows of the one before: no two overlap.

    `beside` is a model of a backend that outlives this one, and `ranks` what a rank's part needs, as `load_model` takes
    them. All ranks are to be given the same calls: each waits in its steps for the others.
    """

    def __init__(
        self, progress: LoadProgress | None = None, beside: LoadedModel | None = None, ranks: RankMemory | None = None
    ) -> None:
        self._progress, self._beside, self._ranks = progress or no_progress, beside, ranks
        self._pools: dict[int, MeanPool] = {}
        self._axes = RowAxes()
        self._last: NDArray[np.int32] = np.zeros(0, np.int32)  # by row: its last sampled token, 0 where it has none
        self._drafts: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # by row, those proposed last
        self._pending: CPUStep | None = None
        self._model: LoadedModel | None = None
        self._drafter: DraftModel | None = None
        self._head_ids: NDArray[np.int32] | None = None
        self._kv_heads: frozenset[tuple[int, int]] = frozenset()  # of all layers, and the queries that share one
        self._segment_floats = 0  # of a token and a segment of attention, at most

    def load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
    ) -> None:
        SUPPORTED.check(spec)
        if (self._ranks is None) != (spec.share.ranks == 1):
            raise ValueError(f"a model that {spec.share.ranks} share is loaded with {self._ranks} as their memory")
        check_tensors(spec, checkpoint)
        drafter = find_drafter(others, spec, config)
        if drafter is not None:
            config = shared_with(config, drafter.spec, beside_drafter(drafter, spec, checkpoint, config))
        self._model = load_model(spec, checkpoint, config, self._progress, self._beside, self._ranks)
        if drafter is not None:
            model, backend = self.model, CPUBackend(self._progress, self.model, self._ranks)
            self._drafter = load_drafter(self, backend, drafter, model.spec, model.config, model.kv.num_blocks)
        self._last = np.zeros(config.max_running, np.int32)
        self._head_ids = None if spec.head_ids is None else head_id_table(spec.head_ids)
        self._drafts = np.zeros((config.max_running, config.speculative_tokens), np.int32)
        attentions = [attention for _, attention in spec.all_attentions()]
        self._kv_heads = frozenset((each.num_kv_heads, each.num_heads // each.num_kv_heads) for each in attentions)
        self._segment_floats = max(each.num_heads * (-(-each.head_size // 32) * 32 + 2) for each in attentions)
        name = select(config.instruction_set).name
        _LOG.info("loaded %s on %s with %d threads", spec.architecture, name, config.threads)

    @property
    def model(self) -> LoadedModel:
        """RuntimeError where none is loaded."""
        if self._model is None:
            raise RuntimeError("no model is loaded")
        return self._model

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def num_threads(self) -> int:
        return self.model.team.size

    @property
    def programs(self) -> tuple[BoundProgram, BoundProgram]:
        """The two programs of a step: over all tokens, and over the tokens whose logits are wanted."""
        return self.model.body, self.model.tail

    def walk(self, program: BoundProgram) -> None:
        """Run a program. StepError: a kernel failed; DeviceLostError: another rank is gone."""
        self.model.team.run(program.at, program.count)
        if self._ranks is not None and self._ranks.is_broken:
            raise DeviceLostError("a rank of the model is gone")

    def stream(self, tokens: int) -> NDArray[np.float32]:
        """Of the last step's first tokens, as it is now: float32 [tokens, hidden_size]."""
        return self.model.workspace.buffers["hidden"].values[:tokens, : self.model.spec.hidden_size]

    def hidden_states(self, tokens: Sequence[int], layer: int | None = None) -> NDArray[np.float32]:
        model, buffers = self.model, self.model.workspace.buffers
        if layer is not None:
            kept = buffers[kept_stream(model.config.hidden_layers.index(layer))]
            return kept.values[np.asarray(tokens, np.intp), : model.spec.hidden_size]
        width, found = model.spec.state_size, buffers.get("handed on", buffers["selected"])
        states, most = np.empty((len(tokens), width), np.float32), model.workspace.max_selected
        for first in range(0, len(tokens), most):
            part = list(tokens[first : first + most])
            self._run_selected(model.final_states, part)
            states[first : first + len(part)] = found.values[: len(part), :width]
        return states

    def states(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> States:
        if not layers:
            return self.hidden_states(tokens)
        return np.concatenate([self.hidden_states(tokens, layer) for layer in layers], axis=1)

    def fused(self, streams: States) -> States:
        model, (count, width) = self.model, streams.shape
        assert model.fusion is not None
        read, written = (model.workspace.buffers[name].values for name in ("streams", "fused"))
        read[:count, :width] = streams
        model.workspace.step[STEP_SELECTED] = count
        self.walk(model.fusion)
        return written[:count, : model.spec.hidden_size]

    def inject(self, states: ForwardInput) -> None:
        if self._pending is not None:
            self._pending.result()
        assert self.model.injection is not None
        self.begin(states)
        self.walk(self.model.injection)

    def new_states(self, count: int, *, lasting: bool = False) -> States:
        return np.zeros((count, self.model.spec.hidden_size), np.float32)

    def carry(self, kept: States, own: States, places: CarriedPlaces) -> States:
        sources, found = places.sources, self.new_states(len(places.sources))
        are_kept = sources < 0
        found[are_kept], found[~are_kept] = kept[~sources[are_kept]], own[sources[~are_kept]]
        tokens, ways = (places.kept >= 0).nonzero()
        kept[places.kept[tokens, ways]] = own[tokens]
        return found

    def logits(self, tokens: Tokens) -> NDArray[np.float32]:
        """Of some of the last step's tokens, float32 [tokens, vocab], overwritten by the next step."""
        self._run_selected(self.model.tail, tokens)
        logits = self.model.workspace.buffers["logits"].values[: len(tokens), : self.model.spec.vocab_size]
        if self.model.spec.logit_scale != 1.0:
            logits *= np.float32(self.model.spec.logit_scale)
        if self.model.spec.logit_soft_cap is not None:
            cap = np.float32(self.model.spec.logit_soft_cap)
            np.multiply(np.tanh(logits / cap), cap, out=logits)
        return logits

    def capacity(self) -> Capacity:
        capacity = self.model.capacity
        return capacity if self._drafter is None else self._drafter.joint_capacity(capacity)

    def device_memory(self) -> None:
        """The process's own memory is all there is."""

    def forget_experts_read(self) -> None:
        self.model.workspace.routing.forget_experts_read()

    def experts_read(self) -> float | None:
        return self.model.workspace.routing.experts_read()

    def open(self, opened: OpenedRow) -> None:
        self.model.rows.open(opened)
        self._axes.open(opened)
        if self._drafter is not None:
            self._drafter.open(opened)

    @property
    def snapshot_bytes(self) -> int:
        return self.model.states.sizes.slot_bytes

    def time_fetch(self) -> float:
        return self.model.states.time_fetch()

    def planes(self, group: int) -> list[NDArray[np.uint8]]:
        """Of blocks of a cache group, or of snapshots behind all groups, uint8 [blocks, bytes] each."""
        if group == len(self.model.kv.num_blocks):
            return [self.model.states.snapshots]
        beside = [] if self._drafter is None else self._drafter.planes(group)
        return [*self.model.kv.planes(group), *(plane.view(np.uint8) for plane in beside)]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        num_parts = len(self.model.kv.num_blocks) + bool(self.model.spec.state_layers())
        return tuple(sum(plane.shape[1] for plane in self.planes(part)) for part in range(num_parts))

    @property
    def layout(self) -> str:
        return select(self.model.config.instruction_set).name

    def new_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        return aligned_zeros(num_bytes, np.uint8)

    def read_cached(self, part: int, places: Sequence[int]) -> Callable[[], NDArray[np.uint8]]:
        contents = np.concatenate([plane[places] for plane in self.planes(part)], axis=1)
        return lambda: contents

    def write_cached(self, part: int, places: Sequence[int], contents: NDArray[np.uint8]) -> Callable[[], None]:
        start = 0
        for plane in self.planes(part):
            plane[places] = contents[:, start : start + plane.shape[1]]
            start += plane.shape[1]
        return lambda: None

    def close(self, row: int) -> None:
        self.model.rows.close(row)
        if self._drafter is not None:
            self._drafter.close(row)
        self._pools.pop(row, None)
        self._axes.close(row)
        self._last[row] = 0

    def submit(self, forward_input: ForwardInput) -> CPUStep:
        if self._pending is not None:
            self._pending.result()
        forward_input = replace(forward_input, columns=self._with_ids(forward_input.columns))
        self.begin(forward_input)
        self.walk(self.model.seeing if forward_input.columns.embeddings else self.model.body)
        self.model.states.take(forward_input.state_moves.taken)
        self._pending = CPUStep(self, forward_input)
        return self._pending

    def _with_ids(self, columns: StepRows) -> StepRows:
        """A step's rows with what they sampled last, and the drafts that were proposed for them."""
        unknown, rows = columns.unknown()
        if not len(unknown):
            return columns
        ids = columns.token_ids.copy()
        places = PROPOSED - ids[unknown]
        ids[unknown] = self._last[rows]  # 0: the row failed and sampled nothing
        proposed = places >= 0
        drafts = self._drafts[rows[proposed], places[proposed]]
        ids[unknown[proposed]] = np.minimum(drafts, self.spec.vocab_size - 1)
        return replace(columns, token_ids=ids)

    def draft(self, step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> NDArray[np.int32]:
        assert ahead is None  # as a step is done before drafts follow it
        return self.submit(step).result().sampled[step.columns.samples, 0]

    def keep_drafts(self, rows: NDArray[np.intp], places: NDArray[np.intp], drafts: NDArray[np.int32]) -> None:
        self._drafts[rows, places] = np.maximum(drafts, 0)  # a row's logits may have been unusable

    def kept_drafts(self) -> NDArray[np.int32]:
        return self._drafts

    def begin(self, forward_input: ForwardInput) -> None:
        """Write the step's arrays where kernels read them, and the embeddings of its tokens."""
        space, columns = self.model.workspace, forward_input.columns
        ids, tokens = columns.token_ids, len(columns.token_ids)
        hidden = space.buffers.get("embedded", space.buffers["hidden"]).values[:tokens, : self.model.spec.state_size]
        self._embed(ids, hidden)
        for first, given in columns.embeddings:
            own = self.model.spec.share.rank == 0
            hidden[first : first + len(given)] = given[:, : self.model.spec.hidden_size] if own else 0.0
        if columns.embeddings:
            self._place_added(columns, tokens)
        if (inputs := self.model.spec.layer_inputs) is not None:
            width = inputs.projection.out_features
            self.model.weights.rows(inputs.table, ids, space.buffers["layer rows"].values[:tokens, :width])
        if forward_input.hidden_states is not None:
            states = space.buffers["states"].values[:tokens, : self.model.spec.state_size]
            states[:] = forward_input.hidden_states
        self.model.ropes.fill(self._axes.positions(columns, forward_input.positions))
        self.model.states.begin(columns, forward_input.state_moves)
        for field, column in enumerate((columns.starts[:-1], columns.num_tokens, columns.num_computed_tokens)):
            space.rows[: len(columns), field] = column
        for group, slots in enumerate(forward_input.slot_mapping):
            space.slots[group][:tokens] = slots
            table = forward_input.block_tables[group]
            space.block_tables[group][: table.shape[0], : table.shape[1]] = table
        space.seen[:tokens] = forward_input.positions
        for first, count in columns.images:
            space.seen[first : first + count] = forward_input.positions[first + count - 1]
        space.step[STEP_TOKENS], space.step[STEP_TERMS] = tokens, 2 * tokens
        space.step[STEP_ROWS] = len(columns)
        space.step[STEP_SPLIT] = self._split(columns)

    def _embed(self, ids: NDArray[np.int32], hidden: NDArray[np.float32]) -> None:
        """hidden [tokens, hidden_size] = the embeddings of ids, or zeros where another rank has them."""
        spec, weights = self.model.spec, self.model.weights
        if not spec.cuts_embedding:
            weights.rows(spec.embedding, ids, hidden)
            return
        own = ids - np.int32(spec.first_id)
        are_own = (own >= 0) & (own < spec.head.out_features)
        rows = np.empty((int(are_own.sum()), spec.hidden_size), np.float32)
        weights.rows(spec.embedding, own[are_own], rows)
        hidden[:] = 0.0
        hidden[are_own] = rows

    def _place_added(self, columns: StepRows, tokens: int) -> None:
        """Write what is added after each of the first layers: zeros where embeddings have no more than themselves."""
        width = self.model.spec.hidden_size
        for layer in range(self.model.spec.deepstack):
            added = self.model.workspace.buffers[added_features(layer)].values[:tokens, :width]
            added[:] = 0.0
            for first, given in columns.embeddings:
                if given.shape[1] > width:
                    added[first : first + len(given)] = given[:, (1 + layer) * width : (2 + layer) * width]

    def _split(self, columns: StepRows) -> int:
        """Segments per query where attention has too few units of work for the threads, else 0."""
        threads, counts = self.model.team.size, columns.num_tokens
        if threads == 1 or (columns.only_decodes and len(columns) >= 4 * threads):  # a row has a unit at least
            return 0
        units = np.minimum.reduce([kv_heads * -(-counts * group // TILE) for kv_heads, group in self._kv_heads]).sum()
        segments = -(-int(columns.num_context_tokens.max()) // SEGMENT)
        fits = len(columns.token_ids) * self._segment_floats * segments <= PARTIAL_FLOATS
        return segments if units < 4 * threads and segments > 1 and fits else 0

    def finish(self, forward_input: ForwardInput, masks: Mapping[int, NDArray[np.uint32]]) -> StepOutput:
        """Sample a step that has run: logits of some tokens at a time. Raises StepError where a kernel failed."""
        self._pending = None
        columns = forward_input.columns
        sampler = StepSampler(self.model.sampling, self.model.rows, columns, masks)
        most = self.model.workspace.max_selected
        for first in range(0, len(sampler.tokens), most):
            sampler.read(first, self.logits(sampler.tokens[first : first + most]))
        numbers, sampled = sampler.last_sampled()
        output = sampler.output(lambda index: self._pooled(columns, index))
        if self._head_ids is not None:
            sampled, output = self._head_ids[sampled], replace(output, sampled=self._head_ids[output.sampled])
        self._last[numbers] = sampled
        return output if self._drafter is None else self._drafter.with_drafts(forward_input, output)

    def _pooled(self, columns: StepRows, index: int) -> Pooled:
        try:
            return self._pool(columns, index)
        except StepError:
            raise  # a kernel's: the step's
        except Exception as reason:  # noqa: BLE001 - one row's numbers are not the others' trouble
            if not isinstance(reason, RealizarError):
                _LOG.error("pooling of a row failed", exc_info=reason)
            return RowError.of(reason, "pooling")

    def _pool(self, columns: StepRows, index: int) -> NDArray[np.float32] | None:
        """The pooled hidden state that a row wants, float32 [hidden_size]."""
        start, end = columns.starts[index : index + 2].tolist()
        if start == end:
            return None
        if columns.pooling[index] == "last":
            return finite_vector(self.hidden_states([end - 1])[0])
        pool = self._pools.setdefault(int(columns.numbers[index]), MeanPool(self.model.spec.hidden_size))
        pool.restart_at(int(columns.num_computed_tokens[index]))
        pool.add(self.hidden_states(range(start, end)))
        return finite_vector(pool.mean())

    def _run_selected(self, program: BoundProgram, tokens: Tokens) -> None:
        space = self.model.workspace
        space.selected[: len(tokens)] = tokens
        space.step[STEP_SELECTED] = len(tokens)
        self.walk(program)

    def shutdown(self) -> None:
        model, self._model, self._pending = self._model, None, None
        drafter, self._drafter = self._drafter, None
        if model is not None and self._beside is None:
            model.team.close()
        if drafter is not None:
            drafter.shutdown()


class MeanPool:
    """Sum of vectors in float64, one after another, so that the mean does not depend on how they are cut into steps."""

    def __init__(self, hidden_size: int) -> None:
        self._sum = np.zeros(hidden_size, np.float64)
        self._count = 0

    def restart_at(self, count: int) -> None:
        """Say how many vectors came before the next: 0 starts again, as after preemption.

        Raises RuntimeError where these are others than those added, so that their sum is not known.
        """
        if count == 0:
            self._sum[:] = 0.0
            self._count = 0
        if count != self._count:
            raise RuntimeError(f"a mean over {count} earlier tokens is wanted, and {self._count} were seen")

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Take in vectors, float32 [tokens, hidden_size]."""
        for vector in hidden:
            self._sum += vector
        self._count += len(hidden)

    def mean(self) -> NDArray[np.float32]:
        """float32 [hidden_size]."""
        return (self._sum / self._count).astype(np.float32)

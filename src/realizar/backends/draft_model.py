"""`DraftModel`: a model beside the main one, or a head that reads its states, whose likeliest tokens are drafts.

It computes the tokens that the main model's steps compute, in the same blocks: a block holds the keys and values of
both models. So its cache is shared, found again and given up with the main one's, and nothing is read twice. A
next-token block reads the hidden state of the token before each one too, and EAGLE-3 what it makes of several:
`PreviousStates` keeps those that later steps need. Gemma 4's assistants read the main model's keys and values, and of
its tokens the last alone. States and drafts stay where the backends compute: the main model's next step finds the ids
there. numpy only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import (
    FUSED_AT_ONCE,
    Backend,
    BlocksAhead,
    Capacity,
    CarriedPlaces,
    Drafts,
    FollowsDrafts,
    ForwardInput,
    GivesHiddenStates,
    InjectsStates,
    ModelSource,
    SampledAhead,
    States,
    TokenIds,
)
from realizar.backends.memory_plan import MemoryPlan
from realizar.backends.resolved_config import NOTHING_BESIDE, Beside, ResolvedConfig
from realizar.backends.supported import num_ids, shared_groups
from realizar.batch import FROM_PREVIOUS_STEP, OpenedRow, ProposedDrafts, StepOutput, StepRows
from realizar.errors import DeviceLostError
from realizar.models.parts import AssistantInputs, BlockInputs, NextTokenInputs, PairedInputs
from realizar.models.spec import ModelSpec
from realizar.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0)


class _GivingBackend(Backend, GivesHiddenStates, Drafts, Protocol):
    """A backend of which states and drafts are asked too."""

    def planes(self, group: int) -> list[Any]:
        """What blocks of a cache group have, in arrays whose first axis is the block."""


def drafter_config(
    config: ResolvedConfig, drafter: ModelSpec, num_blocks: tuple[int, ...] | None = None
) -> ResolvedConfig:
    """The configuration of a drafter, which computes a token more of each row that has sampled, or a block, from the
    main model's, or one of each row alone.

    `num_blocks` is of each of the drafter's cache groups; None plans it alone. Tokens of a block see each other's keys:
    a GPU's kernels of single tokens that write them before all attention are those of `batch_invariant`.
    """
    rows = config.max_running * _rows_of_one(drafter, config)
    fixed = config.batch_invariant or isinstance(drafter.next_token, BlockInputs)
    tokens = rows if isinstance(drafter.next_token, AssistantInputs) else config.max_step_tokens + rows
    return replace(
        config, batch_invariant=fixed, max_running=rows, max_step_tokens=tokens,
        prompt_dtype="f16" if fixed else config.prompt_dtype, speculative_tokens=0, kv_blocks=num_blocks,
        hidden_layers=_last_layers(drafter), beside=NOTHING_BESIDE,
    )  # fmt: skip


def shared_with(config: ResolvedConfig, drafter: ModelSpec, beside: Beside) -> ResolvedConfig:
    """The main model's configuration beside a drafter that takes so much: it keeps the streams that this reads."""
    layers = () if drafter.fusion is None else drafter.fusion.layers
    return replace(config, beside=beside, hidden_layers=tuple(sorted({*config.hidden_layers, *layers})))


def _rows_of_one(drafter: ModelSpec, config: ResolvedConfig) -> int:
    """Rows of a drafter for each of its model, whose configuration it is: the tokens of a block have one each."""
    return 1 + config.speculative_tokens if isinstance(drafter.next_token, BlockInputs) else 1


def _keeps_states(drafter: ModelSpec) -> bool:
    """True for a drafter that reads the state of the token before each one."""
    return isinstance(drafter.next_token, NextTokenInputs | PairedInputs)


def _last_layers(drafter: ModelSpec) -> tuple[int, ...]:
    """Of a drafter, those whose streams are the states before its next drafts; none where the final norm's are."""
    return (len(drafter.layers) - 1,) if isinstance(drafter.next_token, PairedInputs) else ()


def drafter_bytes(
    plan: MemoryPlan, block_bytes: Sequence[int], drafter: ModelSpec, spec: ModelSpec, config: ResolvedConfig
) -> Beside:
    """What a drafter takes beside the main model, of which `config` is; `plan` and `block_bytes` are its own alone."""
    added, groups = [0] * len(spec.cache_groups()), shared_groups(drafter, spec)
    for group, size in zip(groups, block_bytes, strict=True):
        added[group] += size
    fixed = plan.needed_bytes + plan.reserved_bytes
    if drafter.fusion is not None:
        fixed += 4 * FUSED_AT_ONCE * drafter.fusion.linear.in_features
    if isinstance(drafter.next_token, AssistantInputs):
        fixed += 4 * drafter.state_size * config.max_running
    elif drafter.next_token is not None:
        fixed += 4 * drafter.hidden_size * 2 * config.max_step_tokens  # a step's states, and those before its tokens
    if _keeps_states(drafter):
        added[groups[0]] += 4 * drafter.hidden_size
        fixed += 4 * drafter.hidden_size * config.max_running * _recent_tokens(config)
    return Beside(fixed, tuple(added), plan.reserved_bytes)


def _recent_tokens(config: ResolvedConfig) -> int:
    """Tokens of a row whose states are kept: all that a step may compute again, and the one before them."""
    return config.speculative_tokens + 2


def load_drafter(
    main: _GivingBackend, backend: _GivingBackend, drafter: ModelSource, spec: ModelSpec, config: ResolvedConfig,
    num_blocks: Sequence[int],
) -> DraftModel:  # fmt: skip
    """Load a drafter beside `main`, as `DraftModel` takes it. Where that fails, both backends are shut down."""
    try:
        return DraftModel(main, backend, drafter, spec, config, num_blocks)
    except BaseException:
        backend.shutdown()
        main.shutdown()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """How the tokens lie that a drafter reads of the rows of a step: those that stand, and the last one sampled.

    It is the same for all steps whose rows have as many tokens, drafts and results. Nothing changes it.

    Attributes:
        counts, starts: int32 [rows] and [rows + 1], of each row's tokens.
        owners, within: of each token its row, and its place in it.
        given, behind: of each token the index of the step's token that it is; else how many sampled ones stand before
            it, and below 0 where it is one of the step.
        own, own_owners, own_within: of the step's tokens whose states are kept, their index in the step, their row and
            their place in it. left: how many of their row follow, with themselves.
        sources: of each token that is not its row's first, the index among them of the one before it.
        samples: of each row, true to sample after its last token. only_decodes: as of `StepRows`.
        lines: of `SampledAhead`.
    """

    counts: NDArray[np.int32]
    starts: NDArray[np.int32]
    owners: NDArray[np.intp]
    within: NDArray[np.int32]
    given: NDArray[np.intp]
    behind: NDArray[np.intp]
    own: list[int]
    own_owners: NDArray[np.intp]
    own_within: NDArray[np.int32]
    left: NDArray[np.intp]
    sources: NDArray[np.int32]
    samples: NDArray[np.bool_]
    only_decodes: bool
    lines: NDArray[np.int32]

    @classmethod
    def of(cls, columns: StepRows, made: NDArray[np.intp], goes_on: NDArray[np.bool_]) -> _Layout:
        """`made` are the tokens that each row sampled, at most; those that `goes_on` have the last one of them too."""
        return _layout(
            *(each.tobytes() for each in (columns.starts, columns.num_drafts, columns.samples, made, goes_on))
        )


@lru_cache(maxsize=64)
def _layout(of_starts: bytes, of_drafts: bytes, of_samples: bytes, of_made: bytes, of_going: bytes) -> _Layout:
    firsts, drafts = np.frombuffer(of_starts, np.int32), np.frombuffer(of_drafts, np.int32)
    sampled, made = np.frombuffer(of_samples, np.bool_), np.frombuffer(of_made, np.intp)
    goes_on = np.frombuffer(of_going, np.bool_)
    certain = firsts[1:] - firsts[:-1] - drafts
    counts = (certain + np.maximum(made - 1, 0) + goes_on).astype(np.int32)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(starts[-1], dtype=np.int32) - starts[owners]
    stays = counts - goes_on
    ends = np.cumsum(stays, dtype=np.intp)
    own_owners = np.repeat(np.arange(len(stays)), stays)
    own_within = (np.arange(stays.sum()) - (ends - stays)[own_owners]).astype(np.int32)
    sampling = sampled & (certain + drafts > 0)
    indices = np.where(sampling, np.cumsum(sampling) - 1, -1)
    chosen = np.where(goes_on, np.cumsum(goes_on) - 1, -1)
    before = np.where(certain > 0, firsts[:-1] + certain - 1, -1)
    lines = np.stack([indices, starts[:-1] + certain, counts - certain, chosen, before], axis=1)
    return _Layout(
        counts, starts, owners, within, firsts[owners] + np.minimum(within, certain[owners] - 1),
        within - certain[owners], (firsts[own_owners] + own_within).tolist(), own_owners, own_within,
        ends[own_owners] - np.arange(len(own_owners)), (within - 1 + (ends - stays)[owners]).astype(np.int32),
        goes_on, bool((counts == 1).all() and goes_on.all()), lines.astype(np.int32),
    )  # fmt: skip


class PreviousStates:
    """Hidden states of tokens before those that a step computes, where an earlier step computed them.

    Those of a row's last tokens are found by their positions. A row may begin behind a prefix that another one
    computed, at the end of a block: so a block has the state of its last token beside keys and values.

    Attributes:
        states: of all places.
    """

    def __init__(self, backend: GivesHiddenStates, config: ResolvedConfig, num_blocks: int) -> None:
        self._recent, self._block_size = _recent_tokens(config), config.block_size
        self._first_end = config.max_running * self._recent
        self._zeros = self._first_end + num_blocks
        self.states = backend.new_states(self._zeros + 1, lasting=True)

    @property
    def of_blocks(self) -> States:
        """Those of the ends of blocks, [blocks, hidden_size]."""
        return self.states[self._first_end : self._zeros]

    def places(self, columns: StepRows, layout: _Layout, table: NDArray[np.int32]) -> CarriedPlaces:
        """Of a drafter's step; `table` int32 [rows, blocks] is of the blocks in which its tokens lie."""
        numbers, firsts, owners = columns.numbers, columns.num_computed_tokens, layout.own_owners
        sources = layout.sources.copy()
        has_any = layout.counts > 0
        sources[layout.starts[:-1][has_any]] = ~self._before(numbers, firsts, table)[has_any]
        positions = firsts[owners] + layout.own_within
        kept = np.full((len(owners), 2), -1, np.int32)
        recent = numbers[owners] * self._recent + positions % self._recent
        kept[:, 0] = np.where(layout.left <= self._recent, recent, -1)
        last = (positions % self._block_size == self._block_size - 1).nonzero()[0]
        if len(last):
            kept[last, 1] = self._first_end + table[owners[last], positions[last] // self._block_size]
        return CarriedPlaces(sources, kept)

    def _before(self, rows: NDArray[np.intp], firsts: NDArray[np.int32], table: NDArray[np.int32]) -> NDArray[np.intp]:
        """Places of the states before each row's token at position `firsts`, [rows]; of zeros before position 0."""
        last = firsts - 1
        found = rows * self._recent + last % self._recent
        ends = (firsts % self._block_size == 0).nonzero()[0]
        found[ends] = self._first_end + table[ends, last[ends] // self._block_size]
        found[firsts == 0] = self._zeros
        return found


class DraftModel:
    """A loaded drafter. One that raises is not asked again, unless the device is lost.

    Args:
        main: the main model's backend, which gives the states of its last step.
        backend: that nothing is loaded in.
        drafter: as `find_drafter` found it for the main model, whose are `spec`, `config` and `num_blocks`.
    """

    def __init__(
        self, main: _GivingBackend, backend: _GivingBackend, drafter: ModelSource, spec: ModelSpec,
        config: ResolvedConfig, num_blocks: Sequence[int],
    ) -> None:  # fmt: skip
        self._main, self._backend, self._block_size = main, backend, config.block_size
        self._groups, self._num_ids = shared_groups(drafter.spec, spec), num_ids(drafter.spec)
        self.num_drafts = config.speculative_tokens
        self._fails, self._is_part = False, drafter.spec.share.ranks > 1
        self._fusion, self._last_layers = drafter.spec.fusion, _last_layers(drafter.spec)
        self._block = drafter.spec.next_token if isinstance(drafter.spec.next_token, BlockInputs) else None
        self._rows_of_one = _rows_of_one(drafter.spec, config)
        self._reads_keys = isinstance(drafter.spec.next_token, AssistantInputs)
        own = drafter_config(config, drafter.spec, tuple(num_blocks[group] for group in self._groups))
        backend.load(drafter.spec, drafter.checkpoint, own)
        self._follows = backend if isinstance(backend, FollowsDrafts) else None
        self._previous: PreviousStates | None = None
        if _keeps_states(drafter.spec):
            self._previous = PreviousStates(backend, config, num_blocks[self._groups[0]])

    @property
    def backend(self) -> Backend:
        return self._backend

    def planes(self, group: int) -> list[Any]:
        """What blocks of a cache group of the main model have of the drafter, in arrays whose first axis is the block.

        Its backend is of the main one's kind, and has `planes` of its own.
        """
        found = [plane for own, main in enumerate(self._groups) if main == group for plane in self._backend.planes(own)]
        if self._previous is not None and self._groups[0] == group:
            found.append(self._previous.of_blocks)
        return found

    def joint_capacity(self, capacity: Capacity) -> Capacity:
        """The main model's capacity with the memory of both, and the drafts."""
        own = self._backend.capacity()
        return replace(
            capacity, aside_tokens=0, num_drafts=self.num_drafts, spare_positions=int(self._block is not None),
            weight_bytes=capacity.weight_bytes + own.weight_bytes,
            kv_cache_bytes=capacity.kv_cache_bytes + own.kv_cache_bytes, load_s=capacity.load_s + own.load_s,
        )  # fmt: skip

    def open(self, opened: OpenedRow) -> None:
        """Start a row, whose drafts are the most probable tokens whatever its own parameters are."""
        for row in self._rows(opened.row):
            self._backend.open(replace(opened, row=row, sampling=_GREEDY))

    def close(self, row: int) -> None:
        """Also one that was not opened."""
        for own in self._rows(row):
            self._backend.close(own)

    def _rows(self, row: int) -> range:
        """The numbers of the drafter's rows for one of the main model's."""
        return range(row * self._rows_of_one, (row + 1) * self._rows_of_one)

    def shutdown(self) -> None:
        self._backend.shutdown()

    def with_drafts(self, step: ForwardInput, output: StepOutput) -> StepOutput:
        """The results of a step that is done, with the drafts that follow them: `propose`, then `proposed`."""
        self.propose(step, output.num_sampled, output.sampled)
        return self.proposed(step, output)

    def propose(
        self, step: ForwardInput, made: NDArray[np.intp], sampled: NDArray[np.int32] | None, ahead: TokenIds = None
    ) -> None:
        """Start the drafts that follow a step of the main model, in the order in which steps were submitted.

        Its rows have slots for them in their blocks (`StepRows.lookahead`).

        Args:
            made: intp [rows], how many tokens each row sampled; at most, where the host does not know it yet.
            sampled: as of `StepOutput`; None if `ahead`, as of `SampledAhead`, has them.
        """
        if self._fails:
            return
        with self._faults():
            if self._reads_keys:
                self._propose_behind(step, made, sampled, ahead)
            elif self._block is None:
                self._propose(step, made, sampled, ahead)
            else:
                self._propose_block(self._block, step, made, sampled, ahead)

    def proposed(self, step: ForwardInput, output: StepOutput) -> StepOutput:
        """A step's results with what `propose` has started."""
        counts = self._wanted(step.columns, output.num_sampled)
        if self._fails or not counts.any():
            return output
        return replace(output, drafts=ProposedDrafts(counts, partial(self._read, step.columns.numbers)))

    def _wanted(self, columns: StepRows, made: NDArray[np.intp]) -> NDArray[np.int32]:
        """int32 [rows], drafts that a step's rows want, which sampled so many tokens."""
        if columns.lookahead is None:
            return np.zeros(len(columns), np.int32)
        spare = int(self._block is not None)  # a block begins with the token before its drafts
        wanted: NDArray[np.int32] = np.maximum(columns.lookahead - np.int32(spare), 0) * (made > 0)
        return wanted

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Within, a fault ends drafts, and nothing else: what is only to be faster is not the batch's trouble.

        But for ranks, of which others may go on to draft.
        """
        try:
            yield
        except DeviceLostError:
            raise
        except Exception:
            if self._is_part:
                raise
            _LOG.exception("the drafter is asked no more")
            self._fails = True

    def _propose(
        self, step: ForwardInput, made: NDArray[np.intp], sampled: NDArray[np.int32] | None, ahead: TokenIds
    ) -> None:
        """Read the step's tokens that stand and those sampled after them, then go on from each draft in turn.

        Each draft is a step of fewer and fewer rows.
        """
        columns, wanted = step.columns, self._wanted(step.columns, made)
        layout = _Layout.of(columns, made, wanted > 0)
        states = None if self._previous is None else self._states_before(self._previous, step, layout)
        unknown = None if sampled is not None else SampledAhead(ahead, layout.lines, self._num_ids - 1)
        drafts = self._backend.draft(self._standing(step, layout, sampled, states), unknown)
        going = layout.samples.nonzero()[0]
        ends = columns.num_computed_tokens[going] + layout.counts[going]
        self._go_on(step, wanted, ends, layout.starts[1:][going] - 1, drafts)

    def _propose_behind(
        self, step: ForwardInput, made: NDArray[np.intp], sampled: NDArray[np.int32] | None, tokens: TokenIds
    ) -> None:
        """Read what each row sampled last, and go on: the model has the keys and values of all before it.

        Where the host does not know how many stand, the states of all are given, and the device takes one.
        """
        columns, wanted = step.columns, self._wanted(step.columns, made)
        going = wanted.nonzero()[0]
        if not len(going):
            return
        certain, ones, unknown = columns.num_tokens - columns.num_drafts, np.ones(len(going), np.int32), None
        positions = (columns.num_computed_tokens + certain + made - 1)[going].astype(np.int32)
        ends = columns.starts[:-1] + certain + made - 1  # of each row, behind the token before the last sampled one
        if sampled is not None:
            states, token_ids = self._main.states((ends[going] - 1).tolist()), sampled[going, made[going] - 1]
        else:
            offsets = np.cumsum(made)
            within = np.arange(offsets[-1]) - np.repeat(offsets, made)
            states, token_ids = self._main.states((np.repeat(ends, made) + within).tolist()), 0 * ones
            lines = np.stack([_sampled_indices(columns)[going], made[going], 0 * ones, offsets[going] - 1], axis=1)
            unknown = BlocksAhead(tokens, lines.astype(np.int32), self._num_ids - 1)
        drafts = self._draft(step, going, positions, token_ids, ones, ones > 0, states, unknown)
        self._go_on(step, wanted, positions + 1, np.arange(len(going)), drafts)

    def _go_on(
        self, step: ForwardInput, wanted: NDArray[np.int32], ends: NDArray[np.int32], lasts: NDArray[np.integer[Any]],
        drafts: TokenIds,
    ) -> None:  # fmt: skip
        """Keep the first drafts, and those that follow from each in turn.

        Args:
            ends: of rows that want drafts, the positions behind what the drafter has read.
            lasts: the tokens of its step that the first drafts come from.
        """
        columns, going = step.columns, wanted.nonzero()[0]
        if self._follows is not None:
            if len(going):
                self._follows.follow(wanted[going] if self._reads_keys else wanted)
            return
        for place in range(int(wanted.max(initial=0))):
            stays = wanted[going] > place
            if place:
                ends, going, lasts = ends[stays], going[stays], lasts[stays]
                moved = np.int32(0 if self._reads_keys else place)
                drafts, lasts = self._next(step, going, ends - 1 + moved, lasts), np.arange(len(going))
            self._main.keep_drafts(columns.numbers[going], np.full(len(going), place), drafts)

    def _propose_block(
        self, block: BlockInputs, step: ForwardInput, made: NDArray[np.intp], sampled: NDArray[np.int32] | None,
        tokens: TokenIds,
    ) -> None:  # fmt: skip
        """Write the keys and values of the step's tokens that stand, then draft all that the rows want at once.

        Each token of a block is a row of the drafter's step, at whose end all of the block are: so they see each other.
        Where the host does not know how many stand, those of all are written: the block, or what is read next, lies
        over the others.
        """
        columns = step.columns
        layout = _Layout.of(columns, made, np.zeros(len(columns), np.bool_))
        firsts, counts = columns.num_computed_tokens, layout.counts
        assert isinstance(self._backend, InjectsStates)
        self._backend.inject(self._standing(step, layout, sampled, self._states_of(layout.own)))
        wanted = self._wanted(columns, made)
        rows = wanted.nonzero()[0]
        if not len(rows):
            return
        sizes = 1 + wanted[rows]
        owners, within = np.repeat(rows, sizes), np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        begins, numbers = (firsts + counts)[owners], columns.numbers[owners]
        known = 0 if sampled is None else sampled[owners, made[owners] - 1]
        ids = np.where(within == 0, known, block.mask_id).astype(np.int32)
        positions, drafted = (begins + within).astype(np.int32), (within > 0).nonzero()[0]
        computed = self._input(step, owners, positions, ids, np.ones(len(ids), np.int32), within > 0, None)
        seen = (begins + np.repeat(sizes, sizes) - 1).astype(np.int32)
        own = replace(computed.columns, numbers=numbers * self._rows_of_one + within, num_computed_tokens=seen)
        unknown = None
        if sampled is None:
            lines = np.stack([_sampled_indices(columns)[owners], made[owners], within, 0 * within], axis=1)
            unknown = BlocksAhead(tokens, lines.astype(np.int32), self._num_ids - 1)
        drafts = self._backend.draft(replace(computed, columns=own), unknown)
        self._main.keep_drafts(numbers[drafted], within[drafted] - 1, drafts)

    def _read(self, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        return self._main.kept_drafts()[rows]

    def _next(
        self, step: ForwardInput, places: NDArray[np.intp], positions: NDArray[np.int32],
        lasts: NDArray[np.integer[Any]],
    ) -> TokenIds:  # fmt: skip
        """Compute what some rows sampled after tokens of the drafter's last step, `lasts`."""
        reads = self._previous is not None or self._reads_keys
        states = self._backend.states(lasts.tolist(), self._last_layers) if reads else None
        ones, ids = np.ones(len(places), np.int32), np.full(len(places), FROM_PREVIOUS_STEP, np.int32)
        return self._draft(step, places, positions, ids, ones, ones > 0, states)

    def _states_before(self, previous: PreviousStates, step: ForwardInput, layout: _Layout) -> States | None:
        """The state before each token that a drafter reads of a step, as `carry` leaves them; its own are kept."""
        places = previous.places(step.columns, layout, step.block_tables[self._groups[0]])
        return self._backend.carry(previous.states, self._states_of(layout.own), places)

    def _states_of(self, tokens: list[int]) -> States:
        """What the drafter reads of some tokens of the main model's step: float32 [tokens, hidden_size]."""
        if self._fusion is None:
            return self._main.states(tokens)
        if 0 < len(tokens) <= FUSED_AT_ONCE:
            return self._backend.fused(self._main.states(tokens, self._fusion.layers))
        found = self._backend.new_states(len(tokens))
        for first in range(0, len(tokens), FUSED_AT_ONCE):
            part = tokens[first : first + FUSED_AT_ONCE]
            found[first : first + len(part)] = self._backend.fused(self._main.states(part, self._fusion.layers))
        return found

    def _standing(
        self, step: ForwardInput, layout: _Layout, sampled: NDArray[np.int32] | None, states: States | None
    ) -> ForwardInput:
        """A step of the tokens of a step's rows that stand, and the last one sampled of those that go on.

        Those that the host does not know yet are 0.
        """
        columns, owners, size = step.columns, layout.owners, np.int32(self._block_size)
        known = 0 if sampled is None else sampled[owners, np.maximum(layout.behind, 0)]
        ids = np.where(layout.behind < 0, np.maximum(columns.token_ids[layout.given], 0), known)
        none, positions = np.zeros(len(columns), np.int32), columns.num_computed_tokens[owners] + layout.within
        rows = StepRows(
            columns.sequence_ids, columns.numbers, columns.num_computed_tokens,
            np.minimum(ids, np.int32(self._num_ids - 1)).astype(np.int32), layout.starts, layout.samples, none, none,
            only_decodes=layout.only_decodes,
        )  # fmt: skip
        tables, blocks, offsets = (
            [step.block_tables[group] for group in self._groups],
            positions // size,
            positions % size,
        )
        slots = [table[owners, blocks] * size + offsets for table in tables]
        return ForwardInput(rows, positions, tuple(slots), tuple(tables), hidden_states=states)

    def _draft(
        self, step: ForwardInput, places: NDArray[np.intp], firsts: NDArray[np.int32], token_ids: NDArray[np.int32],
        counts: NDArray[np.int32], samples: NDArray[np.bool_], states: States | None,
        ahead: SampledAhead | BlocksAhead | None = None,
    ) -> TokenIds:  # fmt: skip
        """Start to compute tokens of some rows of a step; arguments as of `_input`.

        Returns the most probable token after the last of each row that samples.
        """
        return self._backend.draft(self._input(step, places, firsts, token_ids, counts, samples, states), ahead)

    def _input(
        self, step: ForwardInput, places: NDArray[np.intp], firsts: NDArray[np.int32], token_ids: NDArray[np.int32],
        counts: NDArray[np.int32], samples: NDArray[np.bool_], states: States | None,
    ) -> ForwardInput:  # fmt: skip
        """A step of tokens of some rows of a step, in the blocks that they have there.

        Args:
            places: of the rows in the step. firsts: position of each one's first token. counts: tokens of each.
            states: that the drafter reads beside each token.
            token_ids: one that the drafter's vocabulary lacks is read as another.
            samples: of each row, true to sample the most probable token after its last.
        """
        starts = np.zeros(len(places) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        within = np.arange(starts[-1], dtype=np.int32)
        positions: NDArray[np.int32] = within + np.repeat(firsts - starts[:-1], counts)
        none, size = np.zeros(len(places), np.int32), np.int32(self._block_size)
        token_ids, seen = np.minimum(token_ids, np.int32(self._num_ids - 1)), firsts
        if self._reads_keys:
            seen = firsts - np.int32(1)  # the token has no keys, and sees what the one before it saw
        columns = StepRows(
            step.columns.sequence_ids[places], step.columns.numbers[places], seen, token_ids, starts, samples, none,
            none, only_decodes=bool((counts == 1).all() and samples.all()),
        )  # fmt: skip
        tables = tuple([step.block_tables[group][places] for group in self._groups])
        owners = np.repeat(np.arange(len(places)), counts)
        slots: list[NDArray[np.int32]] = [
            table[owners, positions // size] * size + positions % size for table in tables
        ]
        return ForwardInput(columns, positions, tuple(slots), tables, hidden_states=states)


def _sampled_indices(columns: StepRows) -> NDArray[np.intp]:
    """Of each row of a step its index among those that sample, or -1."""
    sampling = columns.samples & (columns.num_tokens > 0)
    return np.where(sampling, np.cumsum(sampling) - 1, -1)

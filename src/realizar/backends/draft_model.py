"""`DraftModel`: a model beside the main one, or its next-token block, whose likeliest tokens are drafts. numpy only.

It computes the tokens that the main model's steps compute, in the same blocks: a block holds the keys and values of
both models. So its cache is shared, found again and given up with the main one's, and nothing is read twice. A
next-token block reads the hidden state of the token before each one too: `PreviousStates` keeps those that later steps
need.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Backend, Capacity, ForwardInput, GivesHiddenStates, ModelSource, OtherModels
from realizar.backends.memory_plan import MemoryPlan
from realizar.backends.resolved_config import NOTHING_BESIDE, Beside, ResolvedConfig
from realizar.batch import FROM_PREVIOUS_STEP, NOT_SAMPLED, OpenedRow, StepOutput, StepRows
from realizar.errors import DeviceLostError, InvalidRequestError, UnsupportedModelError
from realizar.models.spec import ModelSpec
from realizar.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0)
_DRAFTER = "drafter"
_PADDING = 64  # files of one family pad their vocabularies differently, by up to one in so many ids


class _GivingBackend(Backend, GivesHiddenStates, Protocol):
    """A backend of which states are asked too."""


def find_drafter(others: OtherModels, spec: ModelSpec, config: ResolvedConfig) -> ModelSource | None:
    """The draft model among the models that a load takes beside the main one; None if there is none.

    Raises:
        UnsupportedModelError: a model has another role, or this one can't draft for the main model.
        InvalidRequestError: the configuration has no room for drafts.
    """
    unknown = sorted(others.keys() - {_DRAFTER})
    if unknown:
        raise UnsupportedModelError(f"no backend runs a model as {unknown[0]!r}: the one role is {_DRAFTER!r}")
    drafter = others.get(_DRAFTER)
    if drafter is None:
        return None
    if config.speculative_tokens < 1:
        raise InvalidRequestError("a drafter needs speculative_tokens of at least 1, not 0", "speculative_tokens")
    own, known = _num_ids(drafter.spec), _num_ids(spec)
    if _PADDING * abs(own - known) > known:
        sizes = f"{own} ids, and the model's {known}"
        raise UnsupportedModelError(f"the drafter's vocabulary has {sizes}: they must be the same, but for padding")
    if drafter.spec.next_token is not None and drafter.spec.hidden_size != spec.hidden_size:
        sizes = f"{drafter.spec.hidden_size} numbers, and the model's {spec.hidden_size}"
        raise UnsupportedModelError(f"the next-token block reads hidden states of {sizes}")
    if drafter.spec.context_length < config.context_length:
        lengths = f"{drafter.spec.context_length} tokens, fewer than the {config.context_length} of the context"
        raise UnsupportedModelError(f"the drafter reads {lengths}: lower context_length")
    if drafter.spec.state_layers():
        raise UnsupportedModelError("a drafter whose layers have states does not run: their drafts can't be undone")
    shared_groups(drafter.spec, spec)
    return drafter


def _num_ids(spec: ModelSpec) -> int:
    """Ids that a model reads; a next-token block may draft fewer of them."""
    return spec.tensors[spec.embedding].shape[0]


def shared_groups(drafter: ModelSpec, spec: ModelSpec) -> list[int]:
    """Of each cache group of a drafter, the index of the main model's group whose blocks it shares.

    Raises UnsupportedModelError where the main model has no layers that keep as many tokens.
    """
    windows = [group.window for group in spec.cache_groups()]
    for group in drafter.cache_groups():
        if group.window not in windows:
            kept = "all tokens" if group.window is None else f"a window of {group.window} tokens"
            raise UnsupportedModelError(f"the drafter has layers that keep {kept}, and the model has none")
    return [windows.index(group.window) for group in drafter.cache_groups()]


def drafter_config(config: ResolvedConfig, num_blocks: tuple[int, ...] | None = None) -> ResolvedConfig:
    """The configuration of a drafter, which computes a token more of each row that has sampled, from the main model's.

    `num_blocks` is of each of the drafter's cache groups; None plans it alone.
    """
    tokens = config.max_step_tokens + config.max_running
    return replace(
        config, max_step_tokens=tokens, speculative_tokens=0, hidden_layers=(), beside=NOTHING_BESIDE,
        kv_blocks=num_blocks,
    )  # fmt: skip


def drafter_bytes(
    plan: MemoryPlan, block_bytes: Sequence[int], drafter: ModelSpec, spec: ModelSpec, config: ResolvedConfig
) -> Beside:
    """What a drafter takes beside the main model, of which `config` is; `plan` and `block_bytes` are its own alone."""
    added, groups = [0] * len(spec.cache_groups()), shared_groups(drafter, spec)
    for group, size in zip(groups, block_bytes, strict=True):
        added[group] += size
    fixed = plan.needed_bytes + plan.reserved_bytes
    if drafter.next_token is not None:
        added[groups[0]] += 4 * drafter.hidden_size
        fixed += 4 * drafter.hidden_size * config.max_running * _recent_tokens(config)
    return Beside(fixed, tuple(added))


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


class PreviousStates:
    """Hidden states of tokens before those that a step computes, where an earlier step computed them.

    Those of a row's last tokens are found by their positions. A row may begin behind a prefix that another one
    computed, at the end of a block: so a block has the state of its last token beside keys and values.
    """

    def __init__(self, config: ResolvedConfig, num_blocks: int, hidden_size: int) -> None:
        self._recent = np.zeros((config.max_running, _recent_tokens(config), hidden_size), np.float32)
        self._ends = np.zeros((num_blocks, hidden_size), np.float32)
        self._block_size = config.block_size

    def before(
        self, rows: NDArray[np.intp], firsts: NDArray[np.int32], table: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Those before each row's token at position `firsts`, float32 [rows, hidden_size]; zeros before position 0.

        `table` int32 [rows, blocks] is of the blocks in which the rows' tokens lie.
        """
        last = firsts - 1
        found = self._recent[rows, last % self._recent.shape[1]]
        ends = (firsts % self._block_size == 0).nonzero()[0]
        found[ends] = self._ends[table[ends, last[ends] // self._block_size]]
        found[firsts == 0] = 0.0
        return found

    def keep(
        self, rows: NDArray[np.intp], positions: NDArray[np.int32], blocks: NDArray[np.int32],
        states: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Take in a state of each token, of ascending positions in each row; all arguments are [tokens]."""
        ends = (positions % self._block_size == self._block_size - 1).nonzero()[0]
        self._ends[blocks[ends]] = states[ends]
        count = self._recent.shape[1]
        for place in range(count):  # so that of equal places the last token's stays
            some = (positions % count == place).nonzero()[0]
            self._recent[rows[some], place] = states[some]


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
        self._groups, self._num_ids = shared_groups(drafter.spec, spec), _num_ids(drafter.spec)
        self.num_drafts = config.speculative_tokens
        self._last = np.zeros(config.max_running, np.int32)  # by row: its last sampled token
        self._fails = False
        self._previous: PreviousStates | None = None
        if drafter.spec.next_token is not None:
            self._previous = PreviousStates(config, num_blocks[self._groups[0]], spec.hidden_size)
        own = drafter_config(config, tuple(num_blocks[group] for group in self._groups))
        backend.load(drafter.spec, drafter.checkpoint, own)

    @property
    def backend(self) -> Backend:
        return self._backend

    def joint_capacity(self, capacity: Capacity) -> Capacity:
        """The main model's capacity with the memory of both, and the drafts."""
        own = self._backend.capacity()
        return replace(
            capacity, num_drafts=self.num_drafts, weight_bytes=capacity.weight_bytes + own.weight_bytes,
            kv_cache_bytes=capacity.kv_cache_bytes + own.kv_cache_bytes, load_s=capacity.load_s + own.load_s,
        )  # fmt: skip

    def open(self, opened: OpenedRow) -> None:
        """Start a row, whose drafts are the most probable tokens whatever its own parameters are."""
        self._backend.open(replace(opened, sampling=_GREEDY))

    def close(self, row: int) -> None:
        """Also one that was not opened."""
        self._backend.close(row)

    def shutdown(self) -> None:
        self._backend.shutdown()

    def with_drafts(self, step: ForwardInput, output: StepOutput) -> StepOutput:
        """A step's results with the drafts that follow them; steps come in the order in which they were submitted.

        The step is the main model's. Its rows have slots for the drafts in their blocks (`StepRows.lookahead`).
        """
        if self._fails:
            return output
        try:
            return replace(output, drafts=self._propose(step, output))
        except DeviceLostError:
            raise
        except Exception:  # noqa: BLE001 - a fault of what is only to be faster is not the batch's
            _LOG.exception("the drafter is asked no more")
            self._fails = True
            return output

    def _propose(self, step: ForwardInput, output: StepOutput) -> NDArray[np.int32] | None:
        """Read the step's tokens that stand and those sampled after them, then go on from each draft in turn."""
        columns, made = step.columns, output.num_sampled
        wanted = np.zeros(len(columns), np.int32) if columns.lookahead is None else columns.lookahead * (made > 0)
        token_ids, counts = self._standing(columns, output, wanted > 0)
        states = None if self._previous is None else self._states_before(self._previous, step, counts, wanted > 0)
        every, firsts = np.arange(len(columns)), columns.num_computed_tokens
        found, states = self._run(step, every, firsts, token_ids, counts, wanted > 0, states)
        if not wanted.any():
            return None
        drafts = np.full((len(columns), self.num_drafts), NOT_SAMPLED, np.int32)
        ends = columns.num_computed_tokens + counts
        for place in range(self.num_drafts):
            drafts[wanted > place, place] = found[wanted > place]
            going = (wanted > place + 1).nonzero()[0]
            if not len(going):
                break
            ones, before = np.ones(len(going), np.int32), None if states is None else states[going]
            found, of_going = found.copy(), (step, going, ends[going] + place, drafts[going, place], ones, ones > 0)
            found[going], after = self._run(*of_going, before)
            if states is not None:
                states[going] = after
        return drafts

    def _states_before(
        self, previous: PreviousStates, step: ForwardInput, counts: NDArray[np.int32], goes_on: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """The state before each token that `_standing` gives, float32 [tokens, hidden_size]; the step's are kept."""
        columns, table, stays = step.columns, step.block_tables[self._groups[0]], counts - goes_on
        owners = np.repeat(np.arange(len(columns)), stays)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(stays) - stays, stays)
        own = self._main.hidden_states((columns.starts[owners] + within).tolist())
        positions = columns.num_computed_tokens[owners] + within
        first = previous.before(columns.numbers, columns.num_computed_tokens, table)
        previous.keep(columns.numbers[owners], positions, table[owners, positions // self._block_size], own)
        found = np.empty((counts.sum(), own.shape[1]), np.float32)
        begins = np.zeros(len(found), np.bool_)
        begins[np.cumsum(counts) - counts] = True
        follows = np.ones(len(own), np.bool_)
        follows[(np.cumsum(stays) - 1)[~goes_on]] = False  # the token after these is not there yet
        found[begins], found[~begins] = first, own[follows]
        return found

    def _standing(
        self, columns: StepRows, output: StepOutput, goes_on: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Tokens of a step's rows that stand, and the last one sampled of those that go on: ids, and their numbers."""
        made, rows = output.num_sampled, columns.numbers
        accepted = np.maximum(made - 1, 0).astype(np.int32)
        kept = columns.num_tokens - columns.num_drafts + accepted
        ids = columns.token_ids.copy()
        follows = (ids == FROM_PREVIOUS_STEP).nonzero()[0]
        ids[follows] = self._last[rows[np.searchsorted(columns.starts, follows, side="right") - 1]]
        last = output.sampled[np.arange(len(columns)), np.maximum(made - 1, 0)]
        self._last[rows[made > 0]] = last[made > 0]
        counts = kept + goes_on
        parts = [
            [*ids[start : start + count].tolist(), *([int(sampled)] if more else [])]
            for start, count, sampled, more in zip(columns.starts.tolist(), kept.tolist(), last, goes_on, strict=False)
        ]
        return np.array([token_id for part in parts for token_id in part], np.int32), counts.astype(np.int32)

    def _run(
        self, step: ForwardInput, places: NDArray[np.intp], firsts: NDArray[np.int32], token_ids: NDArray[np.int32],
        counts: NDArray[np.int32], samples: NDArray[np.bool_], states: NDArray[np.float32] | None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:  # fmt: skip
        """Compute tokens of some rows of a step, in the blocks that they have there.

        Args:
            places: of the rows in the step. firsts: position of each one's first token. counts: tokens of each.
            states: before each token, for a next-token block.
            token_ids: one that the drafter's vocabulary lacks is read as another.

        Returns:
            int32 [rows], the most probable token after each row's last; NOT_SAMPLED where `samples` is false. And for a
            next-token block the state of the last token, float32 [rows, hidden_size].
        """
        starts = np.zeros(len(places) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        within = np.arange(starts[-1], dtype=np.int32)
        positions: NDArray[np.int32] = within + np.repeat(firsts - starts[:-1], counts)
        none, size = np.zeros(len(places), np.int32), np.int32(self._block_size)
        token_ids = np.minimum(token_ids, np.int32(self._num_ids - 1))
        columns = StepRows(
            step.columns.sequence_ids[places], step.columns.numbers[places], firsts, token_ids, starts, samples, none,
            none, only_decodes=bool((counts == 1).all() and samples.all()),
        )  # fmt: skip
        tables = tuple([step.block_tables[group][places] for group in self._groups])
        owners = np.repeat(np.arange(len(places)), counts)
        slots: list[NDArray[np.int32]] = [
            table[owners, positions // size] * size + positions % size for table in tables
        ]
        step = ForwardInput(columns, positions, tuple(slots), tables, hidden_states=states)
        sampled: NDArray[np.int32] = self._backend.submit(step).result().sampled[:, 0]
        return sampled, None if states is None else self._backend.hidden_states((starts[1:] - 1).tolist())

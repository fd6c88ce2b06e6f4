"""A backend whose next token is a hash of the whole history, read back through slots and block tables.

It stores, per cache group and slot, a number made of the token and of everything the token sees in that group. A slot
or a table that is wrong, a block freed too soon or given to two rows, a row opened with a wrong history: each changes
the tokens that follow or raises. So does a wrong state, where rows have one (`kv_cache/scripted_states.py`).
`expected_tokens` says the same without blocks, rows, chunks or batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kv_cache.scripted_states import ScriptedStates, states_of
from realizar.backends.base import Capacity, DeviceMemory, ForwardInput
from realizar.batch import FROM_PREVIOUS_STEP, NOT_SAMPLED, PROPOSED, OpenedRow, ProposedDrafts, StepOutput
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.mixers import ShortConvolution
from realizar.models.parts import Linear, Norm
from realizar.models.spec import Attention, FeedForward, Layer, ModelSpec
from realizar.outputs import TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from step_inputs import RowOutput, ScheduledRow, results_of, rows_of, step_output

VOCAB_SIZE = 97
_MASK = (1 << 64) - 1
_WEIGHTS = np.random.default_rng(7).integers(1, 1 << 63, 1 << 15, dtype=np.uint64)


def make_spec(
    windows: Sequence[int | None],
    context_length: int = 4096,
    vocab_size: int = VOCAB_SIZE,
    *,
    has_state: bool = False,
) -> ModelSpec:
    """A spec with a layer per window and maybe one with a state; the scripted backend reads nothing of it."""
    linear = Linear("weight", 1, 1)
    layers = tuple(
        Layer(
            mixer=Attention(1, 1, 1, 1.0, linear, linear, linear, linear, window=window),
            feed_forward=FeedForward("silu", linear, linear),
        )
        for window in windows
    )
    if has_state:
        layers += (Layer(ShortConvolution(1, 3, linear, "kernel", linear), FeedForward("silu", linear, linear)),)
    return ModelSpec("scripted", vocab_size, 1, context_length, "embedding", layers, Norm("rms", 1e-5, "norm"), linear)


def mix(*parts: int) -> int:
    """64 well mixed bits of some integers."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 32
    return state


def value_of(token_id: int, position: int, first: int, seen: NDArray[np.uint64]) -> int:
    """The value of a slot: of the token, its place, and the slots that it sees, which start at position `first`."""
    return mix(token_id, position, int((seen * _WEIGHTS[first : first + len(seen)]).sum()))


def choose(
    state: int,
    sampling: SamplingParams,
    choice: int,
    allowed: NDArray[np.bool_] | None = None,
    num_ids: int = VOCAB_SIZE,
) -> int:
    """The next token after a history whose hash is `state`; of the first `num_ids`, unless they are not allowed."""
    draw = state if sampling.greedy else mix(state, sampling.seed or 0, choice)
    token_id = draw % num_ids
    while allowed is not None and not allowed[token_id]:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def logprobs_of(state: int, token_id: int, top_n: int) -> TokenLogprobs:
    """Made-up log-probabilities, a function of the history."""
    top = tuple((mix(state, place) % VOCAB_SIZE, -0.25 * place) for place in range(1, top_n + 1))
    return TokenLogprobs(token_id, -float(mix(state, token_id) % 1000) / 100, mix(state) % VOCAB_SIZE + 1, top)


def history_states(token_ids: Sequence[int], windows: Sequence[int | None], *, has_state: bool = False) -> list[int]:
    """The hash after each token of a history."""
    values = [np.zeros(len(token_ids), np.uint64) for _ in windows]
    states = []
    for position, token_id in enumerate(token_ids):
        for window, stored in zip(windows, values, strict=True):
            first = 0 if window is None else max(position - window + 1, 0)
            stored[position] = value_of(token_id, position, first, stored[first:position])
        states.append(mix(*(int(stored[position]) for stored in values)))
    return [mix(*pair) for pair in zip(states, states_of(token_ids), strict=True)] if has_state else states


def pooled_of(states: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """The stand-in for the last hidden state of a sequence with these states, or for their mean."""
    values = [state % 4096 for state in (states if pooling == "mean" else states[-1:])]
    return np.array([sum(values) / len(values), len(values)], np.float32)


def expected_tokens(
    prompt: Sequence[int],
    windows: Sequence[int | None],
    sampling: SamplingParams,
    count: int,
    choice: int = 0,
    num_ids: int = VOCAB_SIZE,
    *,
    has_state: bool = False,
) -> list[int]:
    """The first `count` tokens after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        state = history_states(tokens, windows, has_state=has_state)[-1]
        tokens.append(choose(state, sampling, choice, num_ids=num_ids))
    return tokens[len(prompt) :]


class ScriptedStep:
    """A step whose rows are sampled when its result, or the step after it, needs them."""

    def __init__(
        self, backend: ScriptedBackend, rows: Sequence[tuple[ScheduledRow, list[int]]], forward_input: ForwardInput
    ) -> None:
        self._backend, self._rows, self._input = backend, rows, forward_input
        self._masks: dict[int, NDArray[np.bool_]] = {}
        self._deferred: frozenset[int] = frozenset()
        self._output: StepOutput | None = None

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        for row, mask in masks.items():
            require(self._output is None, "masks come after sampling")
            bits = np.unpackbits(np.atleast_2d(mask).view(np.uint8), axis=1, bitorder="little")
            bits = bits[:, : self._backend.vocab_size]
            self._masks[row] = bits.astype(bool)

    def defer(self, rows: Collection[int]) -> None:
        require(self._output is None, "rows are deferred after sampling")
        self._deferred = frozenset(rows)

    def sample(self) -> None:
        self.result()

    def result(self) -> StepOutput:
        if self._output is None:
            output = step_output([self._row_output(row, states) for row, states in self._rows])
            self._output = replace(output, drafts=self._backend.propose(self._input, output))
        return self._output

    def _row_output(self, row: ScheduledRow, states: list[int]) -> RowOutput:
        open_row = self._backend.rows[row.row]
        queried = tuple(logprobs_of(states[ask.index], ask.target or 0, ask.top_n) for ask in row.logprob_queries)
        pooled = None if row.pooling is None else pooled_of(open_row.states or states, row.pooling)
        lacks_mask = (
            open_row.sampling.structured is not None and row.row not in self._masks
        )  # deferred, or a lost step's
        if not row.sample or lacks_mask:
            return RowOutput((), queried=queried, pooled=pooled)
        require(row.row not in self._deferred, "a row with masks is deferred")
        stops = open_row.sampling.stop_token_ids
        sampled: list[int] = []
        for state, draft in zip(states[-row.num_drafts - 1 :], (*row.draft_ids, None), strict=True):
            masks = self._masks.get(row.row)
            allowed = np.ones(self._backend.vocab_size, np.bool_) if masks is None else masks[len(sampled)].copy()
            require(bool(allowed.any()), "no token is allowed")
            early = len(open_row.tokens) - open_row.num_prompt_tokens < open_row.sampling.min_tokens
            if early and np.delete(allowed, list(stops)).any():
                allowed[list(stops)] = False
            sampled.append(self._backend.choose(open_row, state, allowed))
            open_row.tokens.append(sampled[-1])
            if sampled[-1] != draft or sampled[-1] in stops:
                break
        wanted = open_row.sampling.logprobs
        if wanted is None:
            return RowOutput(tuple(sampled), queried=queried)
        states = states[len(states) - row.num_drafts - 1 :]
        logprobs = tuple(logprobs_of(state, token_id, wanted) for state, token_id in zip(states, sampled, strict=False))
        return RowOutput(tuple(sampled), logprobs, queried)


class OpenRow:
    """A row's history, and for a mean its states so far."""

    def __init__(self, opened: OpenedRow) -> None:
        self.sampling, self.tokens, self.choice = opened.sampling, list(opened.history), opened.choice
        self.num_prompt_tokens = opened.num_prompt_tokens
        self.states: list[int] = []


class ScriptedBackend:
    """See the module. `fail_at` makes that submit raise; `num_ids` few ids make drafts come true.

    With `num_drafts` it proposes so many tokens after a row's sampled ones, the last of which is wrong at times.

    With `num_snapshots` rows have a state, and there is memory for so many snapshots; None is no state. For
    `num_host_snapshots` there is memory on the host.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        windows: Sequence[int | None] = (None,),
        *,
        block_size: int = 4,
        num_blocks: Sequence[int] = (64,),
        max_rows: int = 8,
        max_step_tokens: int = 16,
        context_length: int = 256,
        fail_at: int | None = None,
        num_ids: int = VOCAB_SIZE,
        num_snapshots: int | None = None,
        num_host_snapshots: int = 0,
        num_drafts: int = 0,
    ) -> None:
        self.windows = tuple(windows)
        self.max_running, self.max_step_tokens, self.context_length = max_rows, max_step_tokens, context_length
        self.limits = Capacity(
            block_size, tuple(num_blocks), 0, 0, 0, "scripted", 0.0,
            num_snapshots=num_snapshots or 0, num_host_snapshots=num_host_snapshots, num_drafts=num_drafts,
        )  # fmt: skip
        self._states = None if num_snapshots is None else ScriptedStates(num_snapshots, block_size, num_host_snapshots)
        self.fail_at, self.num_ids = fail_at, num_ids
        self.rows: dict[int, OpenRow] = {}
        self.num_steps = self.num_tokens = 0
        self.most_rows = 0
        self.down = False
        self.memory: DeviceMemory | None = None
        self._last: ScriptedStep | None = None
        self._drafts: dict[int, NDArray[np.int32]] = {}  # that were proposed last, by row
        slots = [count * block_size for count in num_blocks]
        self._values = [np.zeros(count, np.uint64) for count in slots]
        self._positions = [np.full(count, -1) for count in slots]

    def load(self, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig, others: object = None) -> None:
        raise NotImplementedError("scripted backends are made loaded")

    def device_memory(self) -> DeviceMemory | None:
        return self.memory

    @property
    def has_state(self) -> bool:
        """True if rows have a state."""
        return self._states is not None

    def capacity(self) -> Capacity:
        return self.limits

    def open(self, opened: OpenedRow) -> None:
        row = opened.row
        require(row not in self.rows, f"row {row} is open already")
        require(0 <= row < self.max_running, f"there is no row {row}")
        require(0 < opened.num_prompt_tokens <= len(opened.history), "the history is shorter than the prompt")
        self.rows[row] = OpenRow(opened)

    def close(self, row: int) -> None:
        del self.rows[row]
        if self._states is not None:
            self._states.close(row)

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self._last is not None:
            self._last.result()  # the device runs one step after the other
        forward_input = self._with_drafts(forward_input)
        self.num_steps += 1
        self.num_tokens += len(forward_input.columns.token_ids)
        if self.num_steps == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        self._check(forward_input)
        self.most_rows = max(self.most_rows, len(rows_of(forward_input)))
        if self._states is not None:
            self._states.restore(forward_input.state_moves)
        rows = [(row, self._run_row(place, row, forward_input)) for place, row in enumerate(rows_of(forward_input))]
        if self._states is not None:
            self._states.take(forward_input.state_moves, rows_of(forward_input))
        self._last = ScriptedStep(self, rows, forward_input)
        return self._last

    def shutdown(self) -> None:
        self.down = True

    def choose(self, open_row: OpenRow, state: int, allowed: NDArray[np.bool_]) -> int:
        """The next token of a row."""
        return choose(state, open_row.sampling, open_row.choice, allowed, self.num_ids)

    def propose(self, step: ForwardInput, output: StepOutput) -> ProposedDrafts | None:
        """Drafts after each row's sampled tokens, for whose keys and values the row has slots: they're written over."""
        lookahead = step.columns.lookahead
        if lookahead is None:  # also of a step that wants none
            return None
        require(self.limits.num_drafts > 0, "drafts are wanted of who has none")
        drafts = np.full((len(rows_of(step)), self.limits.num_drafts), NOT_SAMPLED, np.int32)
        for place, (row, made) in enumerate(zip(rows_of(step), results_of(output), strict=True)):
            require(0 <= row.lookahead <= self.limits.num_drafts, "too many drafts are wanted")
            if not made.token_ids or made.error is not None:
                continue
            tokens = list(self.rows[row.row].tokens)
            for at in range(row.lookahead):
                self._spoil(step, place, len(tokens) - 1)
                state = history_states(tokens, self.windows, has_state=self.has_state)[-1]
                foreseen = self.choose(self.rows[row.row], state, np.ones(self.vocab_size, np.bool_))
                is_wrong = at == row.lookahead - 1 and state % 3 == 0
                tokens.append((foreseen + 1) % self.num_ids if is_wrong else foreseen)
                drafts[place, at] = tokens[-1]
            self._drafts[row.row] = drafts[place].copy()
        counts = np.count_nonzero(drafts != NOT_SAMPLED, axis=1).astype(np.int32)
        return ProposedDrafts(counts, lambda: drafts)

    def _with_drafts(self, step: ForwardInput) -> ForwardInput:
        """The step with the ids of drafts that were proposed."""
        columns, ids = step.columns, step.columns.token_ids.copy()
        for at in (ids <= PROPOSED).nonzero()[0].tolist():
            owner = int(np.searchsorted(columns.starts, at, side="right")) - 1
            ids[at] = self._drafts[int(columns.numbers[owner])][PROPOSED - ids[at]]
            require(ids[at] != NOT_SAMPLED, "a draft is named that was not proposed")
        return replace(step, columns=replace(columns, token_ids=ids))

    def _spoil(self, step: ForwardInput, place: int, position: int) -> None:
        """Write over the slots of a row's position after its tokens: they are nobody else's."""
        size = self.limits.block_size
        for group, tables in enumerate(step.block_tables):
            slot = int(tables[place, position // size]) * size + position % size
            self._values[group][slot], self._positions[group][slot] = 0, -1

    def _check(self, step: ForwardInput) -> None:
        tokens = len(step.columns.token_ids)
        require(0 < tokens <= self.max_step_tokens, f"{tokens} tokens in a step")
        require(len({row.row for row in rows_of(step)}) == len(rows_of(step)), "a row is twice in a step")
        require(
            sum(row.num_tokens for row in rows_of(step)) == tokens == len(step.positions),
            "tokens do not add up",
        )
        for slots in step.slot_mapping:
            require(len(set(slots.tolist())) == tokens, "two tokens share a slot")

    def _run_row(self, place: int, row: ScheduledRow, step: ForwardInput) -> list[int]:
        open_row = self.rows[row.row]
        require(row.num_context_tokens <= self.context_length, "past the context")
        states, token_ids = [], []
        for index in range(row.num_tokens):
            at, position = step.columns.starts[place] + index, row.num_computed_tokens + index
            require(int(step.positions[at]) == position, "a position is wrong")
            token_id = int(step.columns.token_ids[at])
            if token_id == FROM_PREVIOUS_STEP:
                token_id = open_row.tokens[-1]
                require(position == len(open_row.tokens) - 1, "the token sampled before is not the token here")
            draft = index - (row.num_tokens - row.num_drafts)
            known = open_row.tokens[position] if draft < 0 else row.draft_ids[draft]
            require(token_id == known, "a token is not that of the row's history")
            require(draft < 0 or position >= len(open_row.tokens), "a draft of what is known")
            for group in range(len(self.windows)):
                table, slot = step.block_tables[group][place], int(step.slot_mapping[group][at])
                self._store(group, table, slot, position, token_id)
            states.append(mix(*(int(self._values[g][step.slot_mapping[g][at]]) for g in range(len(self.windows)))))
            token_ids.append(token_id)
        if self._states is not None:
            states = [mix(*pair) for pair in zip(states, self._states.advance(row, token_ids), strict=True)]
        if row.pooling == "mean":
            require(row.num_computed_tokens in (0, len(open_row.states)), "a mean that lacks tokens")
            open_row.states = [*open_row.states[: row.num_computed_tokens], *states]
        return states

    def _store(self, group: int, table: NDArray[np.int32], slot: int, position: int, token_id: int) -> None:
        window, size = self.windows[group], self.limits.block_size
        require(slot == table[position // size] * size + position % size, "slot and block table disagree")
        first = 0 if window is None else max(position - window + 1, 0)
        seen = np.arange(first, position)
        slots = table[seen // size] * size + seen % size
        require(bool((self._positions[group][slots] == seen).all()), f"a token that position {position} sees is gone")
        self._values[group][slot] = value_of(token_id, position, first, self._values[group][slots])
        self._positions[group][slot] = position


def require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)

"""The seam between engine and device: `Backend`, `ForwardInput`, `Step`. numpy only.

Scheduler and cache decide with integers; a backend owns weights, KV memory and sampler state. Rows are numbered by the
engine; a row is opened with its sampling parameters before its first step and closed when its request ends. The records
of a row are those of `realizar.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from realizar.backends.resolved_config import ResolvedConfig
from realizar.batch import NO_MOVES, OpenedRow, StateMoves, StepOutput, StepRows
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec

States: TypeAlias = Any
"""Hidden states where a backend computes: float32 [tokens, hidden_size], numpy's on the CPU and torch's on a GPU."""

FUSED_AT_ONCE = 512
"""Tokens whose states a drafter makes of its model's streams at once, at most: of 8,192 these would take 400 MB."""

TokenIds: TypeAlias = Any
"""Token ids where a backend computes: int32 [tokens], numpy's or torch's."""


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """One step's work: the scheduled rows with their token ids, and further arrays over all their tokens.

    Attributes:
        columns: the rows in the order of their tokens.
        positions: int32 [tokens].
        slot_mapping: per cache group int32 [tokens], block * block_size + offset in it.
        block_tables: per cache group int32 [rows, blocks], entry j holding positions j * block_size and on;
            entries of blocks that are out of a window are never read.
        state_moves: copies of states that the step makes.
        hidden_states: float32 [tokens, hidden_size], what a drafter reads beside each token (`NextTokenInputs`,
            `PairedInputs`), where the backend computes; None for others.
    """

    columns: StepRows
    positions: NDArray[np.int32]
    slot_mapping: tuple[NDArray[np.int32], ...]
    block_tables: tuple[NDArray[np.int32], ...]
    state_moves: StateMoves = NO_MOVES
    hidden_states: States | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a loaded backend, beside what its `ResolvedConfig` says.

    Attributes:
        num_blocks: per cache group (`ModelSpec.cache_groups`); block 0 is usable.
        weight_bytes: packed weights. weight_bytes_per_token: read for one token at batch 1.
        kv_cache_bytes: allocated, snapshots on the device included.
        step_sizes: numbers of tokens, ascending, to which a step with prompts is padded; none where none is.
        num_snapshots: of states; 0 for a model without any. num_host_snapshots: of those in the host's memory.
        num_drafts: tokens that the backend itself proposes after a row's sampled tokens, at most (`StepOutput.drafts`).
        spare_positions: that it needs for keys and values after a row's tokens, beyond one for each of these drafts.
        aside_tokens: of a chunk that it reads aside, at most (`ReadsAside`); 0 where it does not.
    """

    block_size: int
    num_blocks: tuple[int, ...]
    weight_bytes: int
    weight_bytes_per_token: int
    kv_cache_bytes: int
    kv_cache_dtype: str
    load_s: float
    step_sizes: tuple[int, ...] = ()
    num_snapshots: int = 0
    num_host_snapshots: int = 0
    num_drafts: int = 0
    spare_positions: int = 0
    aside_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device with memory of its own: what all programs use of it now, and all that it has."""

    used_bytes: int
    total_bytes: int


class Transfer(NamedTuple):
    """Contents of a device's memory that were copied to the host, or back."""

    num_bytes: int
    seconds: float


class Step(Protocol):
    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        """Allow only some ids for some rows: row to uint32 [ceil(vocab / 32)], bit i of word j for id 32 j + i.

        A row with drafts has a mask per sampled token, uint32 [drafts + 1, ceil(vocab / 32)]; those after a forbidden
        draft are never read. Masks act before bias and penalties; log-probabilities stay the model's own.

        May come after launch and must come before `result`, and before the next `submit`. Rows are those whose
        sampling parameters name a grammar: a step without any may sample as soon as it has started.
        """

    def defer(self, rows: Collection[int]) -> None:
        """Let rows that follow a grammar, and get no mask, sample nothing: their samplers stay as they are.

        May come when `set_masks` may. The next step may compute the last token of such a row again, and sample after
        it.
        """

    def sample(self) -> None:
        """Go on to sampling now: all masks are set, and no row is to be deferred.

        Without this call a step does so when `result` or the next `submit` needs it. Raises what `result` does.
        """

    def result(self) -> StepOutput:
        """Wait for the step."""


@runtime_checkable
class CountsExperts(Protocol):
    def forget_experts_read(self) -> None:
        """Begin the count again, after the steps that were submitted. Waits for none of them."""

    def experts_read(self) -> float | None:
        """Experts that a mixture read in a step, on average, since then; None if none was counted. Waits for steps."""


class CarriedPlaces(NamedTuple):
    """Where the states lie that a drafter's step reads, and those that later steps may read.

    Attributes:
        sources: int32 [tokens of the drafter's step], the index of each one's state among the own ones; ~place of a
            state that was kept.
        kept: int32 [own states, 2], places in which each is kept; -1 for none. No two are the same.
    """

    sources: NDArray[np.int32]
    kept: NDArray[np.int32]


class GivesHiddenStates(Protocol):
    def hidden_states(self, tokens: Sequence[int], layer: int | None = None) -> NDArray[np.float32]:
        """Hidden states of some tokens of the step that was submitted last: float32 [tokens, hidden_size].

        Args:
            tokens: their indices in the step.
            layer: one of `ResolvedConfig.hidden_layers`, for the residual stream after it; None for the state after the
                final norm, which every load gives.
        """

    def states(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> States:
        """Those after the final norm, or the streams after some layers side by side, where the backend computes.

        Each is as `hidden_states` gives it. They may be overwritten by whatever is asked for next.
        """

    def fused(self, streams: States) -> States:
        """The `Fusion` of the loaded drafter, of float32 [tokens, features]: float32 [tokens, hidden_size].

        There are at most `FUSED_AT_ONCE` tokens. The states may be overwritten by whatever is asked for next.
        """

    def new_states(self, count: int, *, lasting: bool = False) -> States:
        """Zeros, where the backend computes: float32 [count, hidden_size].

        Those that are `lasting` are of the load: the first ones after it, and zeros again after a sleep.
        """

    def carry(self, kept: States, own: States, places: CarriedPlaces) -> States | None:
        """Make the states that the drafter's next step reads beside its tokens, and keep some.

        Args:
            kept: float32 [places, hidden_size], of earlier steps. own: of a step, float32 [tokens, hidden_size].

        Returns those of the drafter's step, or None where they lie already where it reads them.
        """


class SampledAhead(NamedTuple):
    """Tokens of a step that the host does not know yet, as a drafter's step reads them.

    Attributes:
        tokens: int32 [rows that sampled, 1 + drafts], below 0 after those that stand; where the backend computes.
        lines: int32 [rows, 5], of each row of the drafter's step: its index in `tokens`, or -1; the index in the step
            of the token that the first of them is; how many there is room for; its index among the rows that sample
            after the last one that stands, or -1; and the index of the token before them in the step that sampled, or
            -1 for none.
        largest: the last id that the drafter has.
    """

    tokens: TokenIds
    lines: NDArray[np.int32]
    largest: int


class BlocksAhead(NamedTuple):
    """Where the blocks of a drafter's step begin, and with what, as far as the host does not know it yet.

    The step has the positions of blocks behind all tokens that may stand.

    Attributes:
        tokens: as of `SampledAhead`. largest: the last id that the drafter has.
        lines: int32 [rows, 4], of each row of the drafter's step, a token: the index in `tokens` of what stands before
            its block; how many of these there may be; its place in the block; and, of a drafter that begins with a
            state of each of them, the place of the last one's among the step's `hidden_states`.
    """

    tokens: TokenIds
    lines: NDArray[np.int32]
    largest: int


class Drafts(Protocol):
    """A backend that computes drafts, and keeps those of another model that does; ids stay where it computes."""

    def draft(self, step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> TokenIds:
        """Submit a step. Returns the most probable token after each row that samples, soon overwritten.

        `ahead` has some of its tokens; those behind the ones that stand are computed for nothing. Of a drafter of
        blocks, or an assistant, it has where these begin.
        """

    def keep_drafts(self, rows: NDArray[np.intp], places: NDArray[np.intp], drafts: TokenIds) -> None:
        """Keep drafts at places of rows, by their numbers, for steps that name them; all are [drafts].

        One that is no id of this model's is kept as another.
        """

    def kept_drafts(self) -> NDArray[np.int32]:
        """Wait for them: int32 [max_running, most]."""


@runtime_checkable
class FollowsDrafts(Protocol):
    def follow(self, wanted: NDArray[np.int32]) -> None:
        """Have the model keep what rows of the last step sampled, and what follows from it, as their drafts.

        `wanted`, int32 [rows], are the drafts of each, for which its blocks have room. A next-token block reads the
        states of the step before each, and no layer has any of its own.
        """


@runtime_checkable
class InjectsStates(Protocol):
    def inject(self, states: ForwardInput) -> None:
        """Write the keys and values of tokens' states (`BlockInputs`), of a loaded drafter of blocks."""


@runtime_checkable
class ReadsAside(Protocol):
    """A backend that reads chunks of a prompt on a part of the device, beside its steps (`Capacity.aside_tokens`)."""

    def read_aside(self, chunk: ForwardInput) -> None:
        """Start a chunk of one row behind those before it, and behind the steps that were submitted by now."""

    def num_aside(self) -> int:
        """Chunks that have not ended."""

    def await_aside(self) -> None:
        """Let no later step begin before all chunks have ended."""


@runtime_checkable
class FetchesSnapshots(Protocol):
    """A backend with snapshots of states in the host's memory. No row is open when it is measured."""

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""

    def time_fetch(self) -> float:
        """Seconds in which one becomes the state of a row."""


@runtime_checkable
class PreparesLater(Protocol):
    """A backend that is ready before all that makes it fast is there."""

    @property
    def asks_for_graphs(self) -> bool:
        """True if steps have run that would be faster once `prepare_next` has been called."""

    def prepare_next(self, *, asked: bool) -> bool:
        """Prepare a kind of step more, while no step is in flight: one that is asked for, or if not `asked` any.

        Where kernels are still being compiled it does nothing for now. False where none is left. Results are the same
        before and after. CaptureLostError: the device's context is lost.
        """


@runtime_checkable
class MayBeLost(Protocol):
    """A backend that can come to its end while nothing runs."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Have `lost` called, on whichever thread, once it can't go on, and `check` raises."""

    def check(self) -> None:
        """DeviceLostError: it can't go on."""


@runtime_checkable
class SavesCache(Protocol):
    """A backend whose KV blocks and snapshots of states are copied to the host and back, between two steps.

    They are parts of the cache: blocks of each cache group, and then, of a model with states, snapshots.
    """

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Of one block or snapshot of each part, with those of a loaded drafter."""

    @property
    def layout(self) -> str:
        """Names whatever else the bytes depend on beside the model and its `ResolvedConfig`."""

    def new_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of the host that is copied to the device soonest."""

    def read_cached(self, part: int, places: Sequence[int]) -> Callable[[], NDArray[np.uint8]]:
        """Copy blocks or snapshots as the steps leave them that were submitted by now.

        What is returned waits for the copy, on any thread, and raises KernelError where the device failed: uint8
        [places, bytes of one].
        """

    def write_cached(self, part: int, places: Sequence[int], contents: NDArray[np.uint8]) -> Callable[[], None]:
        """Write uint8 [places, bytes of one] before the next step. What is returned waits until it was read."""


@runtime_checkable
class Sleeps(Protocol):
    """A backend whose device's memory can be given back while the model is idle; its weights wait on the host.

    No row is open and no step in flight when a method is called.
    """

    def sleep(self) -> Transfer:
        """Copy weights and workspace to the host and free the device's memory. The KV cache loses its contents.

        Raises:
            UnsupportedModelError: the model was not loaded for it.
            CapacityError, KernelError: the host's memory does not suffice; the model is awake as before.
            DeviceLostError: the same, but its memory could not be taken again.
        """

    def wake(self) -> Transfer:
        """Copy everything back; raises CapacityError or KernelError for want of memory, asleep as before."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    spec: ModelSpec
    checkpoint: Checkpoint


OtherModels: TypeAlias = Mapping[str, ModelSource]
"""The models of a load beside the main one, by role: `drafter` proposes drafts (`backends/draft_model.py`)."""
NO_OTHERS: OtherModels = MappingProxyType({})


class Backend(Protocol):
    def load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
    ) -> None:
        """Pack the weights and allocate KV cache and workspace, of all models or of none.

        Raises:
            CheckpointError: a tensor is missing, left over or of the wrong shape.
            CapacityError: it does not fit.
            UnsupportedModelError: the device lacks a part of a model, or runs no model in such a role.
        """

    def capacity(self) -> Capacity: ...

    def device_memory(self) -> DeviceMemory | None:
        """None on the CPU."""

    def open(self, opened: OpenedRow) -> None:
        """Start a row.

        Raises DeviceLostError: the backend can't go on. Any other exception is this row's alone, which is to be closed:
        it may be in steps that want nothing of it.
        """

    def close(self, row: int) -> None:
        """End a row, also one that could not be opened, and forget its sampler state."""

    def submit(self, forward_input: ForwardInput) -> Step:
        """Start a step. Two may be in flight; a row with drafts is in no later step before this one's result was read.

        A model with states begins a row at position 0 from zeros, and goes on from the state that it had at the
        position where the row's step begins: `num_uncertain` says how many of the last tokens may be undone.

        Raises:
            CapacityError: memory does not suffice, here or in a step's `result`. All steps in flight are given up by
                the caller; the backend takes others.
            StepError: a kernel failed, here or in a step's `result`; the same holds. What the step was to write into
                the KV cache may not be there, and nothing else has changed.
        """

    def shutdown(self) -> None:
        """Free everything; idempotent."""

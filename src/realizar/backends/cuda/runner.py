"""`CUDABackend`: a model loaded and stepped on a GPU."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import (
    NO_OTHERS,
    BlocksAhead,
    Capacity,
    CarriedPlaces,
    DeviceMemory,
    ForwardInput,
    OtherModels,
    SampledAhead,
    States,
    Transfer,
)
from realizar.backends.cuda.cache_copies import bytes_of_one, read_places, write_places
from realizar.backends.cuda.device import (
    SLOWER,
    DeviceProfile,
    Family,
    WrongKernelsError,
    open_device,
    refused_family,
)
from realizar.backends.cuda.device_errors import device_errors, step_errors, translate
from realizar.backends.cuda.launch import Launch, StepKind, StepLaunch
from realizar.backends.cuda.load import LoadedModel, load_model
from realizar.backends.cuda.plan import beside_drafter
from realizar.backends.cuda.ranks.sums import RankGroup
from realizar.backends.cuda.shapes import fused_tokens, padded_rows, padded_tokens
from realizar.backends.cuda.sleep.load_memory import LoadMemory, SleepingMemory
from realizar.backends.cuda.step import CUDAStep, WantedTokens, wanted_tokens
from realizar.backends.cuda.step_arrays import count_decodes, count_tiles
from realizar.backends.cuda.supported import SUPPORTED
from realizar.backends.draft_model import DraftModel, load_drafter, shared_with
from realizar.backends.load_progress import LoadProgress, no_progress
from realizar.backends.parts import cached_tokens_read
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.supported import find_drafter
from realizar.batch import OpenedRow, StepRows
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CaptureLostError, DeviceLostError, KernelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import AssistantInputs, NextTokenInputs
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)


class CUDABackend:
    """The `Backend` of GPUs. A step runs while the host prepares the next; each samples before the next starts, at once
    where no row's grammar gives it a mask.

    A device of None takes the first GPU; `may_sleep` loads the model so that it can `sleep`. `beside` is a model of a
    backend that outlives this one, and `memory` that backend's, in which both sleep; `ranks` are the others of a rank's
    part, as `load_model` takes them. It `defers`, of a model alone, only on cards that have shown it. `compared` waits
    for what others find of the device meanwhile.
    """

    def __init__(
        self,
        progress: LoadProgress | None = None,
        device: DeviceProfile | None = None,
        *,
        may_sleep: bool = False,
        beside: LoadedModel | None = None,
        memory: LoadMemory | None = None,
        ranks: RankGroup | None = None,
        defers: bool = False,
        compared: Callable[[], DeviceProfile] | None = None,
    ) -> None:
        self._compared = compared
        self._progress, self._ranks = progress or no_progress, ranks
        self._device = device
        self._may_sleep, self._beside, self._defers = may_sleep, beside, defers
        self._memory, self._owns_memory = memory or LoadMemory(), memory is None
        self._model: LoadedModel | None = None
        self._drafter: DraftModel | None = None
        self._pending: CUDAStep | None = None
        self._last: tuple[StepRows, WantedTokens] | None = None  # of the step that was submitted last
        self._gives_states = False

    def load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
    ) -> None:
        SUPPORTED.check(spec)
        if (self._ranks is None) != (spec.share.ranks == 1):
            raise ValueError(f"a model that {spec.share.ranks} share is loaded with {self._ranks} as their group")
        check_tensors(spec, checkpoint)
        drafter = find_drafter(others, spec, config)
        if drafter is not None:
            config = shared_with(config, drafter.spec, beside_drafter(drafter, spec, checkpoint, config))
        self._device = self._device or open_device()
        plain = drafter is None and not self._may_sleep and self._ranks is None
        self._defers = self._defers and plain and self._device.capability == (9, 0)  # on which it was shown
        inputs = (spec if drafter is None else drafter.spec).next_token
        self._gives_states = isinstance(inputs, NextTokenInputs | AssistantInputs)
        while (refused := self._try_load(spec, checkpoint, config, self._device)) is not None:
            self._device = replace(self._device, without=self._device.without | refused)
        if self._ranks is not None:
            self._ranks.end_load()
        if drafter is not None:
            model = self.model
            backend = CUDABackend(self._progress, self.device, beside=model, memory=self._memory)
            self._drafter = load_drafter(self, backend, drafter, model.spec, model.config, model.kv.num_blocks)
        _LOG.info("loaded %s on %s", spec.architecture, self._device.name)

    def _try_load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, device: DeviceProfile
    ) -> frozenset[Family] | None:
        """Load the model; or return the families of kernels to try again without, which a warning names."""
        try:
            with device_errors(device.torch_device):
                if self._may_sleep:
                    self._memory = SleepingMemory(device.torch_device)
                self._model = load_model(
                    spec, checkpoint, config, device, self._progress, self._memory, gives_states=self._gives_states,
                    beside=self._beside, ranks=self._ranks, defers=self._defers,
                    compared=self._compared,
                )  # fmt: skip
            return None
        except WrongKernelsError as error:  # which a warning has named
            _clear_frames(error)
            self._close_memory()
            self._compared = None
            return error.families
        except BaseException as error:
            _clear_frames(error)
            kernel = error.kernel if isinstance(error, KernelError) else None
            refused = None if kernel is None else refused_family(kernel, device.without)
            if refused is None or self._ranks is not None:  # the other ranks would not begin again
                raise
            _LOG.warning("%s; %s", error, SLOWER[refused])
        self._close_memory()  # the rest is free with the error
        return frozenset({refused})

    @property
    def model(self) -> LoadedModel:
        """RuntimeError where none is loaded."""
        if self._model is None:
            raise RuntimeError("no model is loaded")
        return self._model

    def capacity(self) -> Capacity:
        capacity = self.model.capacity
        return capacity if self._drafter is None else self._drafter.joint_capacity(capacity)

    def device_memory(self) -> DeviceMemory | None:
        if not self.device.is_gpu:
            return None
        free, total = torch.cuda.mem_get_info(self.device.torch_device)
        return DeviceMemory(int(total - free), int(total))

    def sleep(self) -> Transfer:
        with device_errors(self.device.torch_device):
            if self._model is not None and self._model.aside is not None:
                self._model.aside.synchronize()  # a chunk may run whose request has ended
            transfer = self._memory.sleep()
            torch.cuda.empty_cache()
            return transfer

    def wake(self) -> Transfer:
        with device_errors(self.device.torch_device):
            return self._memory.wake()

    @property
    def asks_for_graphs(self) -> bool:
        return self.model.graphs.asks

    def prepare_next(self, *, asked: bool) -> bool:
        with device_errors(self.device.torch_device):
            try:
                return self.model.graphs.prepare_next(asked=asked)
            except Exception as error:
                ours = translate(error) or error
                if isinstance(ours, DeviceLostError):
                    raise CaptureLostError(f"{ours} (while graphs were captured: --no-graphs does without)") from error
                raise

    def forget_experts_read(self) -> None:
        with device_errors(self.device.torch_device):
            self.model.experts_read.forget()

    def experts_read(self) -> float | None:
        with device_errors(self.device.torch_device):
            return self.model.experts_read.average()

    @property
    def snapshot_bytes(self) -> int:
        return self.model.states.snapshot_bytes

    def time_fetch(self) -> float:
        with device_errors(self.device.torch_device):
            return self.model.states.time_fetch()

    def planes(self, group: int) -> list[torch.Tensor]:
        """Of blocks of a cache group, or of snapshots behind all groups: tensors whose first axis they are."""
        if group == len(self.model.kv.num_blocks):
            return self.model.states.snapshots
        return [*self.model.kv.planes(group), *([] if self._drafter is None else self._drafter.planes(group))]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        num_parts = len(self.model.kv.num_blocks) + bool(self.model.spec.state_layers())
        return tuple(bytes_of_one(self.planes(part)) for part in range(num_parts))

    @property
    def layout(self) -> str:
        return f"{self.device.name} {sorted(self.device.without)}"

    def new_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        with device_errors(self.device.torch_device):
            memory: NDArray[np.uint8] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.is_gpu).numpy()
            return memory

    def read_cached(self, part: int, places: Sequence[int]) -> Callable[[], NDArray[np.uint8]]:
        return read_places(self.planes(part), places, self.device)

    def write_cached(self, part: int, places: Sequence[int], contents: NDArray[np.uint8]) -> Callable[[], None]:
        self.await_aside()  # a chunk may run whose request has ended, and whose blocks are others' now
        return write_places(self.planes(part), places, contents, self.device)

    def open(self, opened: OpenedRow) -> None:
        with device_errors(self.device.torch_device):
            self.model.sampler.open(opened)
            self.model.space.arrays.open(opened)
        if self._drafter is not None:
            self._drafter.open(opened)

    def close(self, row: int) -> None:
        self.model.sampler.close(row)
        self.model.space.arrays.close(row)
        self.model.finisher.close(row)
        if self._drafter is not None:
            self._drafter.close(row)

    def submit(self, forward_input: ForwardInput) -> CUDAStep:
        with step_errors(self.device.torch_device):
            return self._submit(forward_input)

    def _submit(self, forward_input: ForwardInput) -> CUDAStep:
        if self._pending is not None:
            self._pending.start_sampling()
        wanted = self._start(forward_input)
        finish, device = self.model.finisher.finish, self.device.torch_device
        self._pending = CUDAStep(forward_input, wanted, finish, device, self._drafter)
        if not self.model.sampler.awaits_masks(forward_input.columns.numbers):
            self._pending.start_sampling()  # the device goes on to it by itself
        return self._pending

    def _start(self, forward_input: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> WantedTokens:
        """Start all launches of a step but its sampling."""
        wanted = wanted_tokens(forward_input)
        kind = self._kind(forward_input)
        self.model.states.begin(forward_input.state_moves)
        self._send(forward_input, kind, wanted)
        self.model.ropes.place(self.model.space.arrays.spread)
        places = None
        if isinstance(ahead, BlocksAhead):
            places = self.model.space.arrays.begin_blocks(ahead, self.model.config.block_size)
        elif ahead is not None:
            assert self._beside is not None
            self.model.space.arrays.take_sampled(ahead, self._beside.space.arrays["ids"])
        if forward_input.hidden_states is not None:
            self.model.space.place_states(forward_input.hidden_states, places)
        most = self.model.space.arrays.sizes.selected
        self.model.finisher.selected = wanted.tokens[:most]
        self.model.graphs.run(kind, min(len(wanted.tokens), most))
        self.model.states.end(forward_input.state_moves)
        self._last = forward_input.columns, wanted
        return wanted

    def draft(self, step: ForwardInput, ahead: SampledAhead | BlocksAhead | None = None) -> torch.Tensor:
        with step_errors(self.device.torch_device):
            return self.model.space.sampled[: self._start(step, ahead).num_sampled]

    def follow(self, wanted: NDArray[np.int32]) -> None:
        assert self._last is not None
        assert self.model.chain is not None
        (before, tokens), rows, most = self._last, len(wanted), int(wanted.max(initial=0))
        chosen = np.zeros(rows, np.intp)
        chosen[tokens.rows] = np.arange(len(tokens.rows))
        padded = padded_rows(rows, self.model.space.arrays.sizes.rows)
        longest = int(before.num_context_tokens.max(initial=0)) + most
        kind = StepKind(padded, padded, 0, self.model.attention.is_long(padded, longest))
        with step_errors(self.device.torch_device):
            self.model.chain.begin(before.numbers, wanted, chosen, padded)
            for left in range(most, 0, -1):
                self.model.chain.go_on()
                if left > 1:
                    self._decode_kept(kind, rows)

    def _decode_kept(self, kind: StepKind, rows: int) -> None:
        """Run the step that the chain has made."""
        self.model.finisher.selected = range(rows)
        self.model.graphs.run(kind, rows)

    def keep_drafts(self, rows: NDArray[np.intp], places: NDArray[np.intp], drafts: torch.Tensor) -> None:
        kept = self.model.space.arrays.drafts
        where = self._indices(places * kept.shape[1] + rows)
        kept.view(-1).index_copy_(0, where, drafts.clamp(0, self.model.spec.vocab_size - 1))

    def kept_drafts(self) -> NDArray[np.int32]:
        with step_errors(self.device.torch_device):
            return self.model.space.arrays.drafts.T.cpu().numpy()

    def read_aside(self, chunk: ForwardInput) -> None:
        assert self.model.aside is not None
        with step_errors(self.device.torch_device):
            self.model.aside.read(chunk)

    def num_aside(self) -> int:
        with device_errors(self.device.torch_device):
            return 0 if self.model.aside is None else self.model.aside.num_running()

    def await_aside(self) -> None:
        if self.model.aside is not None:
            self.model.aside.wait()

    def _kind(self, step: ForwardInput) -> StepKind:
        sizes, embeds = self.model.space.arrays.sizes, bool(step.columns.embeddings)
        tiles = count_tiles(step, sizes.tile_tokens)
        decodes = padded_rows(count_decodes(step), sizes.rows)
        if not tiles:
            longest = int(step.columns.num_context_tokens.max(initial=0))
            return StepKind(decodes, decodes, 0, self.model.attention.is_long(decodes, longest), embeds)
        tokens = padded_tokens(len(step.columns.token_ids), sizes.tokens)
        kind = self.model.graphs.padded(StepKind(tokens, decodes, tiles))
        return replace(kind, embeds=True, whole=sizes.whole and bool(step.columns.images)) if embeds else kind

    def _send(self, step: ForwardInput, kind: StepKind, wanted: WantedTokens) -> None:
        """Send a step's arrays; a sampled token becomes its row's next one at once where no drafts must be verified."""
        arrays, columns = self.model.space.arrays, step.columns
        if columns.only_decodes:
            arrays.send(step, kind, columns.starts[:-1], columns.numbers)
            return
        most = arrays.sizes.selected
        numbers = np.full(len(wanted.tokens), -1, np.int32)
        numbers[: wanted.num_sampled] = np.where(columns.num_drafts > 0, -1, columns.numbers)[wanted.sampled[1]]
        arrays.send(step, kind, wanted.tokens[:most], numbers[:most])

    def launches(self, forward_input: ForwardInput) -> list[StepLaunch]:
        """The launches of a step, in order, its arrays on the device already: for a profile. Rows are not sampled."""
        wanted, most = wanted_tokens(forward_input), self.model.space.arrays.sizes.selected
        kind = self._kind(forward_input)
        self._send(forward_input, kind, wanted)
        selected = padded_rows(min(len(wanted.tokens), most), most)
        return [
            StepLaunch(launch.name, partial(launch.run, of), self._bytes_read(launch, forward_input))
            for launch, of in self.model.graphs.launches(kind, selected)
        ]

    def _bytes_read(self, launch: Launch, step: ForwardInput) -> int:
        if launch.attention is None:
            return int(launch.weight_bytes * min(1.0, launch.share_of_token * len(step.columns.token_ids)))
        return cached_tokens_read(launch.attention, step) * self.model.kv.token_bytes(launch.attention)

    @property
    def device(self) -> DeviceProfile:
        assert self._device is not None
        return self._device

    def stream(self, tokens: int) -> NDArray[np.float32]:
        """Of the last step's first tokens, as it is now: float32 [tokens, hidden_size]."""
        return self.model.space.hidden[:tokens].cpu().numpy().copy()

    def hidden_states(self, tokens: Sequence[int], layer: int | None = None) -> NDArray[np.float32]:
        with step_errors(self.device.torch_device):
            states: torch.Tensor = self.states(tokens, () if layer is None else (layer,)).cpu()
        return states.numpy().copy()

    def states(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> States:
        finisher = self.model.finisher
        if layers:
            kept = [self.model.space.kept[self.model.config.hidden_layers.index(layer)] for layer in layers]
            first, end = (tokens[0], tokens[-1] + 1) if tokens else (0, 0)
            if list(tokens) == list(range(first, end)):  # nearly always
                return torch.cat([each[first:end] for each in kept], dim=1)
            chosen = self._indices(np.array(tokens, np.intp))
            return torch.cat([each.index_select(0, chosen) for each in kept], dim=1)
        if self._gives_states and finisher.selected[: len(tokens)] == tokens:
            return self.model.space.final_states[: len(tokens)]
        parts = finisher.final_states(tokens)
        if len(tokens) <= self.model.space.arrays.sizes.selected:
            return next(parts, self.model.space.final_states[:0])
        states, end = self.new_states(len(tokens)), 0
        for part in parts:
            states[end : end + len(part)] = part
            end += len(part)
        return states

    def fused(self, streams: States) -> States:
        space, count = self.model.space, len(streams)
        space.streams[:count].copy_(streams)
        self.model.fusion.run(fused_tokens(count, space.arrays.sizes))
        return space.hidden[:count]

    def inject(self, states: ForwardInput) -> None:
        assert states.hidden_states is not None
        with step_errors(self.device.torch_device):
            kind = self._kind(states)
            self.model.space.arrays.send(states, kind, (), ())
            self.model.space.place_states(states.hidden_states)
            self.model.injection.run(kind.tokens)

    def new_states(self, count: int, *, lasting: bool = False) -> States:
        with self._memory.emptied() if lasting else nullcontext():
            return torch.zeros((count, self.model.spec.hidden_size), device=self.device.torch_device)

    def carry(self, kept: States, own: States, places: CarriedPlaces) -> None:
        assert self.model.chain is not None
        self.model.chain.carry(kept, own, places)

    def _indices(self, places: NDArray[np.intp]) -> torch.Tensor:
        """What tensors are indexed with, on its way to the device."""
        copied = torch.empty(len(places), dtype=torch.int64, pin_memory=self.device.is_gpu)
        copied.numpy()[:] = places
        return copied.to(self.device.torch_device, non_blocking=True)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of some of the last step's tokens, at most as many as the workspace has room for."""
        return self.model.finisher.logits(tokens)

    def shutdown(self) -> None:
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            drafter.shutdown()
            del drafter  # and with it what it holds of the device
        gpu = self._device.torch_device if self._device is not None and self._device.is_gpu else None
        try:
            with device_errors(gpu):
                if gpu is not None and self._model is not None:
                    torch.cuda.synchronize(gpu)
                self._free()
                if gpu is not None:
                    torch.cuda.empty_cache()
        except DeviceLostError as error:
            _LOG.warning("GPU memory is freed only when the process ends: %s", error)
        if self._ranks is not None:
            self._ranks.close()

    def _free(self) -> None:
        model, self._model, self._pending, self._beside = self._model, None, None, None
        if model is not None:
            model.close()
            del model
        self._close_memory()

    def _close_memory(self) -> None:
        if self._owns_memory:
            self._memory.close()


def _clear_frames(error: BaseException) -> None:
    """Drop what a load that failed has left on the device: the variables of the frames that its error came through."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__

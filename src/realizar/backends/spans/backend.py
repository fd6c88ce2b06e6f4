"""`SpanBackend`: a model whose layers several devices compute, one after another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import (
    NO_OTHERS,
    Backend,
    Capacity,
    DeviceMemory,
    ForwardInput,
    GivesHiddenStates,
    OtherModels,
    Step,
)
from realizar.backends.resolved_config import LayerSpan, ResolvedConfig
from realizar.batch import NO_MOVES, OpenedRow, StepOutput, StepRows
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.cut_layers import cut_layers
from realizar.models.spec import ModelSpec
from realizar.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
_GREEDY = SamplingParams(temperature=0.0)


class GivingBackend(Backend, GivesHiddenStates, Protocol):
    """A backend of which hidden states are asked too."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A device with its layers; of each of its cache groups the index among those of the whole model."""

    backend: GivingBackend
    spec: ModelSpec
    groups: tuple[int, ...]

    def input_of(self, step: ForwardInput, columns: StepRows) -> ForwardInput:
        moves = step.state_moves if self.spec.state_layers() else NO_MOVES
        slots, tables = (
            tuple(of_all[group] for group in self.groups) for of_all in (step.slot_mapping, step.block_tables)
        )
        return replace(step, columns=columns, slot_mapping=slots, block_tables=tables, state_moves=moves)

    def stream(self, tokens: int) -> NDArray[np.float32]:
        """Of the last step's tokens after its last layer: float32 [tokens, hidden_size]."""
        return self.backend.hidden_states(range(tokens), len(self.spec.layers) - 1)


class SpanBackend:
    """A backend that has one for each of `ResolvedConfig.spans`, and hands the stream on from each to the next.

    The last one samples. The others sample too, from a head that means nothing: so their steps have the shapes for
    which a GPU has graphs. A step is handed on through the host's memory, and begins when the one before has ended.

    `make` gives a backend for a span of the model, not loaded.
    """

    def __init__(self, make: Callable[[LayerSpan, ModelSpec, Checkpoint], GivingBackend]) -> None:
        self._make = make
        self._spans: list[_Loaded] = []
        self._pending: SpanStep | None = None
        self._sampled: NDArray[np.int32] = np.zeros(0, np.int32)  # by row, its last token; 0 where it has none

    def load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
    ) -> None:
        if others:
            raise UnsupportedModelError("a model whose layers several devices compute has no drafter but its own text")
        windows = [group.window for group in spec.cache_groups()]
        for span in config.spans:
            own = cut_layers(spec, span.first, span.stop)
            backend = self._make(span, own, checkpoint)
            groups = tuple(windows.index(group.window) for group in own.cache_groups())
            self._spans.append(_Loaded(backend, own, groups))
            backend.load(own, checkpoint, span.config)
        self._sampled = np.zeros(config.max_running, np.int32)
        _LOG.info("%s: %s", spec.architecture, config.device_label)

    def capacity(self) -> Capacity:
        if not self._spans:
            raise RuntimeError("no model is loaded")
        each = [(loaded, loaded.backend.capacity()) for loaded in self._spans]
        capacities = [capacity for _, capacity in each]
        blocks: dict[int, int] = {}
        for loaded, capacity in each:
            for group, count in zip(loaded.groups, capacity.num_blocks, strict=True):
                blocks[group] = min(count, blocks.get(group, count))
        snapshots = [capacity.num_snapshots for loaded, capacity in each if loaded.spec.state_layers()]
        sizes = next((capacity.step_sizes for capacity in capacities if capacity.step_sizes), ())
        return Capacity(
            block_size=capacities[0].block_size,
            num_blocks=tuple(blocks[group] for group in sorted(blocks)),
            weight_bytes=sum(one.weight_bytes for one in capacities),
            weight_bytes_per_token=sum(one.weight_bytes_per_token for one in capacities),
            kv_cache_bytes=sum(one.kv_cache_bytes for one in capacities),
            kv_cache_dtype=", ".join(dict.fromkeys(one.kv_cache_dtype for one in capacities)),
            load_s=sum(one.load_s for one in capacities),
            step_sizes=sizes,
            num_snapshots=min(snapshots, default=0),
        )

    def device_memory(self) -> DeviceMemory | None:
        found = (loaded.backend.device_memory() for loaded in self._spans)
        return next((memory for memory in found if memory is not None), None)

    def open(self, opened: OpenedRow) -> None:
        for loaded in self._spans[:-1]:
            loaded.backend.open(replace(opened, sampling=_GREEDY))
        self._spans[-1].backend.open(opened)

    def close(self, row: int) -> None:
        for loaded in self._spans:
            loaded.backend.close(row)
        self._sampled[row] = 0

    def submit(self, forward_input: ForwardInput) -> SpanStep:
        if self._pending is not None:
            self._pending.result()
        columns = self._with_ids(forward_input.columns)
        passed = replace(columns, logprob_queries={}, pooling={})
        for loaded in self._spans[:-1]:
            step = loaded.backend.submit(loaded.input_of(forward_input, passed))
            stream = loaded.stream(len(columns.token_ids))
            step.result()
            passed = replace(passed, embeddings=((0, stream),))
        last = self._spans[-1]
        columns = replace(columns, embeddings=passed.embeddings)
        self._pending = SpanStep(self, columns, last.backend.submit(last.input_of(forward_input, columns)))
        return self._pending

    def _with_ids(self, columns: StepRows) -> StepRows:
        """A step's rows with what they sampled last: no drafts are this backend's own."""
        unknown, rows = columns.unknown()
        if not len(unknown):
            return columns
        ids = columns.token_ids.copy()
        ids[unknown] = self._sampled[rows]
        return replace(columns, token_ids=ids)

    def read(self, columns: StepRows, step: Step) -> StepOutput:
        """Wait for a step of the last device, and keep what its rows sampled."""
        self._pending = None
        output = step.result()
        counts = output.num_sampled
        rows = (counts > 0).nonzero()[0]
        self._sampled[columns.numbers[rows]] = output.sampled[rows, counts[rows] - 1]
        return output

    def shutdown(self) -> None:
        spans, self._spans, self._pending = self._spans, [], None
        for loaded in reversed(spans):
            loaded.backend.shutdown()


class SpanStep:
    """A step of the last device, which samples."""

    def __init__(self, backend: SpanBackend, columns: StepRows, own: Step) -> None:
        self._backend, self._columns, self._own = backend, columns, own
        self._output: StepOutput | None = None

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self._own.set_masks(masks)

    def defer(self, rows: Collection[int]) -> None:
        self._own.defer(rows)

    def sample(self) -> None:
        self._own.sample()

    def result(self) -> StepOutput:
        if self._output is None:
            self._output = self._backend.read(self._columns, self._own)
        return self._output

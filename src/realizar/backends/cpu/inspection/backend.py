"""Each of a step's operations is measured alone, and the residual stream read between them."""

from __future__ import annotations

import time

import numpy as np

from realizar.backends.bandwidth import LEAST_BYTES, read_bandwidth
from realizar.backends.base import ForwardInput
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.routing import COUNT_EXPERTS
from realizar.backends.cpu.kv.layout import KVLayout
from realizar.backends.cpu.operations import BoundOperation, BoundProgram
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime, cached_tokens_read
from realizar.backends.step_values import StageValues, describe_values, stage_names
from realizar.errors import InvalidRequestError
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention, ModelSpec


class InspectedCPUBackend(CPUBackend):
    def begin(self, forward_input: ForwardInput) -> None:
        self.model.states.assume(forward_input.columns)
        super().begin(forward_input)

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        return time_operations(self, step, repeats)

    def read_limit(self, step_bytes: int) -> ReadLimit:
        size = max(step_bytes, self.num_threads * LEAST_BYTES)
        return ReadLimit(read_bandwidth(self.num_threads, size), size)

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        return read_values(self, self.spec, step)


# Times of a step's operations, each walked alone by the whole team, in the order of the step.
#
# Going through the step in order, and not over one operation again and again, leaves in the caches what a step leaves
# there: weights come from memory unless the caches hold the whole model.

_EMPTY_WALKS = 50


@kernel()
def _nothing(arguments: int, thread: int, threads: int) -> None:
    """A kernel that does nothing: a walk of it costs what every walk costs."""


def time_operations(backend: CPUBackend, step: ForwardInput, repeats: int) -> list[PartTime]:
    """Run a step, then each of its operations alone, `repeats` times over: the best of each, calling it left out.

    The step's rows are open. Raises InvalidRequestError where more rows are sampled than there is room for logits.
    """
    most = backend.model.workspace.max_selected
    if np.count_nonzero(step.columns.samples) > most:
        raise InvalidRequestError(f"at most {most} rows can be profiled at once on the CPU", "batch")
    backend.submit(step).result()
    operations = [operation for bound in backend.programs for operation in bound.operations]
    alone = [BoundProgram([operation]) for operation in operations]
    sizes, runs = [], []
    for repeat in range(repeats + 1):  # the first finds caches cold
        times = []
        for operation, each in zip(operations, alone, strict=True):
            times.append(_seconds(backend, each))
            if repeat == 0:
                sizes.append(_bytes_read(backend, operation, step))  # experts are those that were chosen just now
        runs.append(times)
    calling = _calling_s(backend)
    best = [max(0.0, min(times) - calling) for times in zip(*runs, strict=True)]
    return [
        PartTime(operation.part, seconds, size)
        for operation, seconds, size in zip(operations, best, sizes, strict=True)
    ]


def _bytes_read(backend: CPUBackend, operation: BoundOperation, step: ForwardInput) -> int:
    if operation.is_of_experts:
        return operation.weight_bytes * int(backend.model.workspace.routing.counts[COUNT_EXPERTS])
    if operation.attention is None:
        return operation.weight_bytes
    return cached_tokens_read(operation.attention, step) * _token_bytes(backend, operation.attention)


def _token_bytes(backend: CPUBackend, attention: Attention | SharedAttention) -> int:
    capacity = backend.capacity()
    layout = KVLayout(attention.num_kv_heads, attention.head_size, capacity.block_size, capacity.kv_cache_dtype)
    return layout.block_bytes // capacity.block_size


def _calling_s(backend: CPUBackend) -> float:
    empty = BoundProgram([BoundOperation("nothing", _nothing, np.zeros(1, np.int64))])
    return min(_seconds(backend, empty) for _ in range(_EMPTY_WALKS))


def _seconds(backend: CPUBackend, program: BoundProgram) -> float:
    start = time.perf_counter()
    backend.walk(program)
    return time.perf_counter() - start


def read_values(backend: CPUBackend, spec: ModelSpec, step: ForwardInput) -> list[StageValues]:
    """Run a step operation by operation and describe the stream at each of `stage_names`, then the last logits.

    No other step is on its way.
    """
    backend.begin(step)
    stages, found = iter(stage_names(spec)), []
    for operation in backend.programs[0].operations:
        if operation.begins_block:
            found.append(describe_values(next(stages), backend.stream(len(step.columns.token_ids))))
        backend.walk(BoundProgram([operation]))
    found.append(describe_values(next(stages), backend.stream(len(step.columns.token_ids))))
    logits = backend.logits([len(step.columns.token_ids) - 1])
    return [*found, describe_values("logits", np.asarray(logits, np.float32))]

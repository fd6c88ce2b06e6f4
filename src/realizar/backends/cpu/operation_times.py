"""How long each operation of a step takes: walked alone by the whole team, in the order of the step.

Going through the step in order, and not over one operation again and again, leaves in the caches what a step leaves
there: weights come from memory unless the caches hold the whole model.
"""

from __future__ import annotations

import time

import numpy as np
from numba import cfunc, types

from realizar.backends.base import ForwardInput
from realizar.backends.cpu.bind import BoundProgram
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kv.layout import KVLayout
from realizar.backends.cpu.records import aligned_zeros
from realizar.backends.cpu.runner import MAX_SELECTED, CPUBackend
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.backends.parts import PartTime, cached_tokens_read, part_of
from realizar.backends.program import Attend, Operation, Project, build_program
from realizar.errors import InvalidRequestError
from realizar.models.spec import Attention, ModelSpec

_EMPTY_WALKS = 50


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def _nothing(arguments: int, thread: int, threads: int) -> None:
    """What a walk costs besides its kernels."""


def time_operations(backend: CPUBackend, spec: ModelSpec, step: ForwardInput, repeats: int) -> list[PartTime]:
    """Run a step, then each of its operations alone, `repeats` times over: the best of each, calling it left out.

    Args:
        backend: loaded with `spec`, the step's rows opened.

    Raises:
        InvalidRequestError: more rows are chosen for than there is room for logits.
    """
    if sum(row.sample for row in step.rows) > MAX_SELECTED:
        raise InvalidRequestError(f"at most {MAX_SELECTED} rows can be profiled at once on the CPU", "batch")
    backend.submit(step).result()
    program = build_program(spec)
    operations = [*program.body, *program.tail]
    named = [part for operation in operations for part in _parts(backend, operation, step)]
    alone = [each for bound in backend.programs for each in one_by_one(bound)]
    runs = [[_seconds(backend, each) for each in alone] for _ in range(repeats + 1)]  # the first finds caches cold
    calling = _calling_s(backend)
    best = [max(0.0, min(times) - calling) for times in zip(*runs, strict=True)]
    return [PartTime(name, seconds, read) for (name, read), seconds in zip(named, best, strict=True)]


def _parts(backend: CPUBackend, operation: Operation, step: ForwardInput) -> list[tuple[str, int]]:
    """Name and bytes of what an operation is bound to."""
    if isinstance(operation, Project):
        return [(part_of(operation), backend.weight_bytes(operation.linear))]
    if isinstance(operation, Attend):
        read = cached_tokens_read(operation.attention, step) * _token_bytes(backend, operation.attention)
        return [(part_of(operation), read), ("join", 0)]
    return [(part_of(operation), 0)]


def _token_bytes(backend: CPUBackend, attention: Attention) -> int:
    """Keys and values of one token in one layer, scales and padding included."""
    capacity = backend.capacity()
    layout = KVLayout(attention.num_kv_heads, attention.head_size, capacity.block_size, capacity.kv_cache_dtype)
    return layout.block_bytes // capacity.block_size


def one_by_one(bound: BoundProgram) -> list[BoundProgram]:
    """A program for each operation, at whose end all threads are done."""
    table = aligned_zeros(bound.table.size, np.int64).reshape(bound.table.shape)
    table[:] = bound.table
    table[:, 2] = 1
    return [BoundProgram(table[i : i + 1], (bound.arguments[i],)) for i in range(len(table))]  # type: ignore[arg-type]


def _calling_s(backend: CPUBackend) -> float:
    """What walking an operation takes that does nothing."""
    table = aligned_zeros(OPERATION_FIELDS, np.int64).reshape(1, OPERATION_FIELDS)
    table[0] = _nothing.address, 0, 1
    empty = BoundProgram(table, ())  # type: ignore[arg-type]
    return min(_seconds(backend, empty) for _ in range(_EMPTY_WALKS))


def _seconds(backend: CPUBackend, program: BoundProgram) -> float:
    start = time.perf_counter()
    backend.walk(program)
    return time.perf_counter() - start

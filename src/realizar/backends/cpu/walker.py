"""The walk: every thread runs the same list of kernels and meets the others at barriers. No Python in between.

An operation is three int64: kernel address, argument record address, and whether a barrier follows. Barriers spin for
some microseconds, then yield the processor, so that a busy machine costs time and not progress.

Every thread has a cache line of its own in the record of a team (`sync_words`), and its first word counts the barriers
it has reached. The first thread reads all lines and then announces the barrier in its own, so no line has two writers:
with one shared counter, 16 threads would own its cache line one after another.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from realizar.backends.cpu.codegen.emit import I32, I64
from realizar.backends.cpu.emitted import Value, emitted
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.memory import read_i64

OPERATION_FIELDS = 3
LINE_BYTES = 64
_SPINS = 4000


def sync_words(threads: int) -> int:
    """int64 words of a team's record of barriers, all zero at first."""
    return threads * LINE_BYTES // 8


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@emitted
def call_kernel(builder: Any, kernel: Value, arguments: Value, thread: Value, threads: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    builder.call(builder.inttoptr(kernel, kind.as_pointer()), [arguments, thread, threads])


@emitted
def atomic_add(builder: Any, address: Value, value: Value) -> Value:
    """Add to the int64 at `address`; returns what was there."""
    return builder.atomic_rmw("add", _pointer(builder, address), value, "seq_cst")


@emitted
def atomic_exchange(builder: Any, address: Value, value: Value) -> Value:
    """Write the int64 at `address`; returns what was there."""
    return builder.atomic_rmw("xchg", _pointer(builder, address), value, "seq_cst")


@emitted
def atomic_load(builder: Any, address: Value) -> Value:
    """The int64 at `address`; later reads are not moved before it."""
    return builder.load_atomic(_pointer(builder, address), "acquire", 8)


@emitted
def atomic_store(builder: Any, address: Value, value: Value) -> None:
    """Write the int64 at `address`; earlier writes are not moved after it."""
    builder.store_atomic(value, _pointer(builder, address), "release", 8)


@emitted
def yield_processor(builder: Any) -> None:
    module = builder.module
    function = module.globals.get("sched_yield") or ir.Function(module, ir.FunctionType(I32, []), "sched_yield")
    builder.call(function, [])


@njit
def _await_count(line: int, count: int) -> None:
    spins = 0
    while atomic_load(line) < count:
        spins += 1
        if spins > _SPINS:
            yield_processor()


@njit
def barrier(sync: int, thread: int, threads: int) -> None:
    own = sync + thread * LINE_BYTES
    count = atomic_load(own) + 1
    if thread == 0:
        for other in range(1, threads):
            _await_count(sync + other * LINE_BYTES, count)
        atomic_store(own, count)
    else:
        atomic_store(own, count)
        _await_count(sync, count)


@njit
def walk_all(operations: int, count: int, sync: int, thread: int, threads: int) -> None:
    for index in range(count):
        at = operations + index * OPERATION_FIELDS * 8
        call_kernel(read_i64(at, 0), read_i64(at, 1), thread, threads)
        if threads > 1 and read_i64(at, 2) != 0:
            barrier(sync, thread, threads)


@kernel(signature=types.void(*[types.int64] * 5))
def walk(operations: int, count: int, sync: int, thread: int, threads: int) -> None:
    walk_all(operations, count, sync, thread, threads)

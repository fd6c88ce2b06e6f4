"""The walk: every thread runs the same list of kernels and meets the others at barriers. No Python in between.

An operation is three int64: kernel address, argument record address, and whether a barrier follows. Barriers spin for
some microseconds, then yield the processor, so that a busy machine costs time and not progress.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from realizar.backends.cpu.emit import I32, I64
from realizar.backends.cpu.memory import load_i64

OPERATION_FIELDS = 3
ARRIVED, GENERATION, SYNC_WORDS = 0, 8, 16  # int64 words, a cache line apart
_SPINS = 4000


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def call_kernel(typing_context: Any, kernel: Any, arguments: Any, thread: Any, threads: Any) -> Any:
    """Call the C function at address `kernel`."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address`; returns what was there."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Write the int64 at `address`; returns what was there."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`; later reads are not moved before it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(builder, values[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write the int64 at `address`; earlier writes are not moved after it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _pointer(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def yield_processor(typing_context: Any) -> Any:
    """Let another thread of the machine run."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        module = builder.module
        function = module.globals.get("sched_yield") or ir.Function(module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def barrier(sync: int, threads: int) -> None:
    """Wait until all threads are here."""
    generation = atomic_load(sync + GENERATION * 8)
    if atomic_add(sync + ARRIVED * 8, 1) == threads - 1:
        atomic_store(sync + ARRIVED * 8, 0)
        atomic_store(sync + GENERATION * 8, generation + 1)
        return
    spins = 0
    while atomic_load(sync + GENERATION * 8) == generation:
        spins += 1
        if spins > _SPINS:
            yield_processor()


@njit(types.void(types.int64, types.int64, types.int64, types.int64, types.int64), nogil=True, cache=True)
def walk(operations: int, count: int, sync: int, thread: int, threads: int) -> None:
    """Run `count` operations as thread `thread` of `threads`."""
    for index in range(count):
        at = operations + index * OPERATION_FIELDS * 8
        call_kernel(load_i64(at, 0), load_i64(at, 1), thread, threads)
        if threads > 1 and load_i64(at, 2) != 0:
            barrier(sync, threads)

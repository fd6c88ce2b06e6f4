"""Compiles the kernels of each kind of processor into the package, for the wheel.

    python scripts/release/wheel_kernels.py [KIND]

A kind's go into a zip file of their own, where `kernel_cache.py` finds them. Any x86-64 can compile those of x86-64,
which the wheel has. What was compiled before comes from the cache.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module

from realizar.backends.cpu import kernels, threads
from realizar.backends.cpu.codegen.float_tile import FLOAT_BYTES, FLOAT_TYPES
from realizar.backends.cpu.codegen.formats import packed_format
from realizar.backends.cpu.codegen.recurrence import run_columns
from realizar.backends.cpu.codegen.vector_math import CLAMPED
from realizar.backends.cpu.compile_ahead import CompileAhead
from realizar.backends.cpu.instruction_set import KINDS, InstructionSet
from realizar.backends.cpu.kernel import Kernel
from realizar.backends.cpu.kernel_cache import archive_of, read_kernel, target
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.quantize import ACTIVATIONS
from realizar.backends.cpu.kv.layout import KV_DTYPES
from realizar.backends.cpu.weights.load import COMPILED, make_read_rows
from realizar.backends.cpu.weights.pack import REPACKED, make_repack, make_transpose

_HEAD_SIZES = (64, 128, 256)  # of gated delta nets


def kernels_of_kind(kind: InstructionSet) -> Iterator[Kernel]:
    """All kernels that models run on a kind of processor, those that take longest to compile first."""
    library, lanes = KernelLibrary(kind), kind.lanes
    for dtype in KV_DTYPES:
        yield from (library.attend(dtype), library.rotate(dtype))
    yield from _without_constants()
    for weight_format in dict.fromkeys(map(packed_format, REPACKED)):
        yield from (library.linear(weight_format, add) for add in (False, True))
        yield library.expert_linear(weight_format)
    for kind_of_float in FLOAT_TYPES:
        yield from (library.float_linear(kind_of_float, add) for add in (False, True))
        yield library.expert_float_linear(kind_of_float)
    for activation in ACTIVATIONS:
        for gated in (True,) if activation == CLAMPED else (False, True):
            yield from (library.activate(activation, gated), library.expert_activate(activation, gated))
    yield library.mix(lanes)
    yield from (library.recur(lanes, columns) for columns in {run_columns(size, lanes) for size in _HEAD_SIZES})
    yield from (make_repack(number, lanes) for number in range(len(REPACKED)))
    yield from (make_read_rows(number) for number in range(len(COMPILED)))
    yield from (make_transpose(size, lanes) for size in sorted(set(FLOAT_BYTES.values())))


def _without_constants() -> Iterator[Kernel]:
    modules = [import_module(each.name) for each in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    found = {value.name: value for each in (*modules, threads) for value in vars(each).values()
             if isinstance(value, Kernel)}  # fmt: skip
    yield from sorted(found.values(), key=lambda each: "sampling" not in each.name)


def compile_kind(kind: InstructionSet) -> None:
    """Write the archive of a kind, for which this process compiles."""
    assert target() == kind.name, f"this process compiles for {target()}"
    archive = archive_of(kind.name)
    archive.unlink(missing_ok=True)  # before it is read
    archive.parent.mkdir(exist_ok=True)
    wanted = list(kernels_of_kind(kind))
    with CompileAhead(wanted, len(os.sched_getaffinity(0)), lambda _: None):
        pass
    with zipfile.ZipFile(archive, "w") as file:  # the wheel compresses it
        for each in wanted:
            file.writestr(zipfile.ZipInfo(each.name), (read_kernel(each.name) or each.keep()).pack())
    print(f"{len(wanted)} kernels for {kind.name}: {archive.stat().st_size / 1e6:.1f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernels of each kind of processor into the package.")
    names = {kind.name: kind for kind in KINDS if kind.processor.startswith("x86-64")}
    parser.add_argument("kind", nargs="?", choices=names, help="the kind that this process compiles for; default: all")
    given = parser.parse_args().kind
    if given is not None:
        compile_kind(names[given])
        return
    for kind in names.values():
        environment = {"NUMBA_CPU_NAME": kind.processor, "NUMBA_CPU_FEATURES": kind.target_features}
        subprocess.run([sys.executable, __file__, kind.name], env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()

"""`kernel` makes a C function of a Python function: compiled by Numba, or read from the cache of compiled kernels.

Neither happens before its address is first asked for, so that a process compiles and reads only what its models need.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from llvmlite import binding
from numba import cfunc, types
from numba.core.base import _load_global_helpers
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import _nrt_python

from realizar.backends.cpu.kernel_cache import CompiledKernel, compiles_for_target, has_kernel, keep_kernel, read_kernel

_OF_A_WALK = types.void(types.int64, types.int64, types.int64)
_CTYPES: dict[Any, Any] = {types.void: None, types.int64: ctypes.c_int64, types.float32: ctypes.c_float}
_PACKAGE = __package__

_making = threading.RLock()  # Numba compiles on one thread at a time, and a kernel is made once
_engines: list[Any] = []  # own the code: a kernel's stays as long as the process


class Kernel:
    """A C function. `name` says how to make it: its module, the function there that makes it, and the constants of it.

    Where that function has none it is the kernel itself.
    """

    def __init__(self, function: Callable[..., Any], constants: tuple[int, ...], signature: Any) -> None:
        module = function.__module__.removeprefix(f"{_PACKAGE}.")
        maker, *inner = function.__qualname__.split(".<locals>.")
        self.name = " ".join([module, maker, *(["-"] if inner else []), *map(str, constants)])
        self._function, self._signature = function, signature

    @cached_property
    def address(self) -> int:
        """Where its code is; compiled now, and kept on disk, if it never was."""
        with _making:
            if (made := vars(self).get("address")) is None:
                made = _load(read_kernel(self.name) or self.keep())
            return int(made)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """It as a function of Python, which runs without the interpreter's lock."""
        result, *arguments = [_CTYPES[kind] for kind in (self._signature.return_type, *self._signature.args)]
        return ctypes.CFUNCTYPE(result, *arguments)(self.address)

    @property
    def is_compiled(self) -> bool:
        """Whether its address can be had without the compiler."""
        return "address" in vars(self) or has_kernel(self.name)

    def keep(self) -> CompiledKernel:
        """Compile it, and write it into the cache."""
        with _parts_unoptimised() as codegen:
            compiled = cfunc(self._signature)(self._function)
            CPUCodeLibrary._optimize_final_module(compiled._library)
            code = CompiledKernel(compiled.native_name, codegen._tm.emit_object(compiled._library._final_module))
        if compiles_for_target():
            keep_kernel(self.name, code)
        return code


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code of a function with that of all functions that it calls: neither optimised as a whole nor made machine code.

    Numba does both for each function on the way to a kernel, and again for the kernel, which has all of them in it.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


@contextmanager
def _parts_unoptimised() -> Iterator[Any]:
    """Have Numba make a `_Part` of each function that it compiles meanwhile; yields what makes the machine code."""
    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock:  # others' functions wait
        codegen._library_class = _Part
        codegen.set_env = lambda _name, _env: None  # a function without machine code has no place for it
        try:
            yield codegen
        finally:
            del codegen._library_class, codegen.set_env


def kernel(*constants: int, signature: Any = _OF_A_WALK) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a kernel of a function; `constants` are the arguments of the function around it, if it is made by one."""
    return lambda function: Kernel(function, constants, signature)


def make_kernel(name: str) -> Kernel:
    """The kernel of a name."""
    module, maker, *made = name.split()
    found = getattr(import_module(f"{_PACKAGE}.{module}"), maker)
    return found(*map(int, made[1:])) if made else found


def _load(code: CompiledKernel) -> int:
    """The address of a kernel. It has symbols of its own: those of others may have the same names."""
    _name_functions()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code.object_file))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(code.symbol))


@cache
def _name_functions() -> None:
    """Give Numba's functions, which kernels call for memory and exceptions, their names, as its compiler does."""
    _load_global_helpers()
    for name, at in _nrt_python.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", at)

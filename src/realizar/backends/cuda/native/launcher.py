"""Cubins on the device, and their launch with programmatic dependent launch; through `cuda.bindings`."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from realizar.backends.cuda.native.compiler import Source, begin_compiling, compile_sources
from realizar.errors import KernelError
from realizar.extras import how_to_install

_LOG = logging.getLogger(__name__)

_modules: dict[tuple[int, bytes], Any] = {}
_functions: dict[tuple[int, str, bytes], Any] = {}
_most_shared: dict[int, int] = {}  # dynamic shared memory that a function was allowed, by its handle
_ARGUMENT_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float, "t": None}


def driver_module() -> Any:
    """The driver's functions; KernelError where cuda-bindings is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelError(f"cuda-bindings is not installed ({error}): {how_to_install('cuda')}") from error
    return driver


def checked(result: tuple[Any, ...], what: str, kernel: str | None = None) -> Any:
    """The value of a driver call, or KernelError; `kernel`: the source of the kernel that it is about."""
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"{what}: {status.name}", kernel)
    return values[0] if values else None


def _function(cubin: bytes, name: str, source: str) -> Any:
    """An entry point of a cubin that is loaded once in a context, and stays: a model loaded again takes no more memory.

    Raises KernelError where the device refuses the code.
    """
    driver = driver_module()
    context = int(checked(driver.cuCtxGetCurrent(), "finding the context"))
    digest = hashlib.sha256(cubin).digest()
    key = context, name, digest
    if key not in _functions:
        if (context, digest) not in _modules:
            _modules[context, digest] = checked(driver.cuModuleLoadData(cubin), f"loading kernel {name}", source)
        function = driver.cuModuleGetFunction(_modules[context, digest], name.encode())
        _functions[key] = checked(function, f"finding kernel {name}", source)
    return _functions[key]


def _allow_shared(function: Any, shared_bytes: int, name: str, source: str) -> None:
    """Ask for dynamic shared memory, which is refused beyond 48 KiB together with static shared memory otherwise.

    Kernels of several sizes share a function, so the largest that one of them has asked for stays.
    """
    if shared_bytes <= _most_shared.get(int(function), 0):
        return
    driver = driver_module()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    what = f"kernel {name} with {shared_bytes} bytes of shared memory"
    checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes), what, source)
    _most_shared[int(function)] = shared_bytes


class Kernel:
    """A loaded entry point. Belongs to the context that is current when it is made."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, source: str | None = None) -> None:
        """Load a cubin for launches with so much dynamic shared memory; errors carry `source`, or else `name`.

        Raises KernelError where the device refuses the code, or has less shared memory.
        """
        self.name, self.shared_bytes, self._source = name, shared_bytes, source or name
        self._function = _function(cubin, name, self._source)
        _allow_shared(self._function, shared_bytes, name, self._source)

    def launch(
        self, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any], sizes: str, stream: int,
        dependent: bool,
    ) -> None:  # fmt: skip
        """Start the kernel on a stream; KernelError where the launch is refused.

        Args:
            grid: blocks in x, y, z. threads: per block.
            sizes: a letter for each argument, `p`, `i`, `f` or `t`: device address, integer, float or `TensorMap`.
            dependent: start while the kernel before still runs, once that one allows it.
        """
        driver = driver_module()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared_bytes, stream
        if dependent:
            config.attrs, config.numAttrs = [_dependent_launch()], 1
        arguments_and_types = tuple(arguments), _types(sizes)
        status = driver.cuLaunchKernelEx(config, self._function, arguments_and_types, 0)
        checked(status, f"launching {self.name}", self._source)


class PlannedKernel:
    """Stands for a kernel of a device that is planned for: its launches start nothing."""

    def launch(self, *_arguments: object, **_options: object) -> None:
        pass


class LoadedKernels:
    """Kernels of one device by their sources: compiled by `prepare`, or else when they are first asked for.

    `planned`: of a device that is planned for (`meta`), on which `prepare` only has kernels compiled, by others.
    """

    def __init__(self, arch: str, *, planned: bool = False) -> None:
        self._arch, self._planned = arch, planned
        self._loaded: dict[Source, Kernel | PlannedKernel] = {}

    def prepare(self, sources: Iterable[Source], compiled: Callable[[int, int], None] | None = None) -> None:
        """Load kernels; those that are not on disk are compiled side by side, and never while a graph is captured.

        Raises KernelError where one does not compile or does not fit the device; `compiled` as of `compile_sources`.
        """
        missing = [source for source in dict.fromkeys(sources) if source not in self._loaded]
        if self._planned:
            begin_compiling(missing, self._arch)
            return
        for source, cubin in zip(missing, compile_sources(missing, self._arch, compiled), strict=True):
            self._loaded[source] = Kernel(cubin, source.name, source.shared_bytes)

    def __getitem__(self, source: Source) -> Kernel | PlannedKernel:
        """Raises KernelError as `prepare` does."""
        if self._planned:
            return PlannedKernel()
        if source not in self._loaded:
            self.prepare([source])
        return self._loaded[source]


@cache
def _types(sizes: str) -> tuple[Any, ...]:
    return tuple(_ARGUMENT_TYPES[size] for size in sizes)


@cache
def _dependent_launch() -> Any:
    """The attribute of programmatic dependent launch, of which each launch takes a copy: making it takes 20 us."""
    driver = driver_module()
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute

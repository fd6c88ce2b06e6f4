"""CUDA C++ to machine code by NVRTC, kept on disk; needs `cuda-bindings` and NVRTC's wheel, neither a GPU nor nvcc."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from realizar.errors import KernelError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel before compilation.

    Attributes:
        name: the entry point, which the text declares under the macro NAME.
        files: sources in this folder, joined in this order.
        defines: macros, in order.
    """

    name: str
    files: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The whole program."""
        head = "".join(f"#define {key} {value}\n" for key, value in (*self.defines, ("NAME", self.name)))
        return head + "".join(_read(file) for file in self.files)


@cache
def _read(file: str) -> str:
    return resources.files("realizar.backends.cuda.native").joinpath(file).read_text(encoding="utf-8")


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability; from 9.0 on with the features of that architecture alone."""
    major, minor = capability
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def compile_source(source: Source, arch: str) -> bytes:
    """The cubin of a kernel, from the cache where it is there.

    Args:
        source: what to compile.
        arch: `sm_80`, `sm_90a` and so on.

    Raises:
        KernelError: NVRTC is missing or refuses the source; the message holds the first lines of its log.
    """
    text = source.text()
    digest = hashlib.sha256(f"{_nvrtc_version()} {arch}\n{text}".encode()).hexdigest()[:32]
    path = cache_folder() / f"{source.name}-{digest}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    cubin = _compile(source.name, text, arch)
    _keep(path, cubin)
    return cubin


def cache_folder() -> Path:
    """Where cubins lie, under XDG_CACHE_HOME or ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "realizar" / "cubins"


def _keep(path: Path, cubin: bytes) -> None:
    """Write through a file of another name, so that no reader sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(path)
    except OSError as error:
        _LOG.warning("compiled kernels can't be kept in %s: %s", path.parent, error)


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelError(f"NVRTC is not installed ({error}): pip install 'realizar[cuda]'") from error
    return nvrtc


@cache
def _nvrtc_version() -> str:
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _compile(name: str, text: str, arch: str) -> bytes:
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC can't start: {status.name}")
    try:
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--device-as-default-execution-space"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
            raise KernelError(f"kernel {name} does not compile for {arch}: {'; '.join(lines[:3]) or status.name}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)

"""NVRTC alone: text in, cubin out. Imports nothing of this project, so that it also runs as a process of its own.

NVRTC compiles one program at a time in a process; many kernels are compiled by many processes:
`python nvrtc.py NAME ARCH < source > cubin`.
"""

import sys
from functools import cache
from typing import Any

OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


@cache
def version() -> str:
    """NVRTC's version; raises ImportError or RuntimeError where it is not installed."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def compile_text(name: str, text: str, arch: str) -> bytes:
    """Machine code for `sm_80`, `sm_90a` and so on; ValueError with the log's first errors where NVRTC refuses."""
    nvrtc = _nvrtc()
    success = nvrtc.nvrtcResult.NVRTC_SUCCESS
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], [])
    if status != success:
        raise ValueError(f"NVRTC can't start: {status.name}")
    try:
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != success:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
            raise ValueError("; ".join(lines[:3]) or str(status.name))
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin: bytes = b" " * int(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _main() -> int:
    try:
        sys.stdout.buffer.write(compile_text(sys.argv[1], sys.stdin.read(), sys.argv[2]))
    except ValueError as error:
        sys.stderr.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())

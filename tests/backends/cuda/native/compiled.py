"""Checks of compiled kernels that need no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest

from realizar.backends.cuda.native.compiler import Source, compile_source, compile_sources

_CUBIN = "kernel.cubin"


class Tiled(Protocol):
    """Parameters of a kernel."""

    @property
    def kind(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def blocks(self) -> int: ...


def check(sources: list[Source], arch: str) -> None:
    for source, cubin in zip(sources, compile_sources(sources, arch), strict=True):
        assert cubin[:4] == b"\x7fELF"
        assert source.name.encode() in cubin


def check_registers(sources: list[Source], all_tiles: Sequence[Tiled], arch: str, tmp_path: Path) -> None:
    """Check that kernels compile, use no stack, and leave registers for as many blocks as their tiles say.

    And that the Hopper kernel makes weights while it multiplies: where it finds too few registers, the compiler
    waits for every matmul.
    """
    check(sources, arch)
    for source, tiles in zip(sources, all_tiles, strict=True):
        (usage,) = resources_of(compile_source(source, arch), tmp_path).values()
        assert usage["STACK"] == usage["LOCAL"] == 0, (tiles, usage)
        assert usage["REG"] * tiles.threads * tiles.blocks <= 65536, (tiles, usage)
        if tiles.kind in ("wgmma", "wgmma_fp8"):
            code = disassembled(tmp_path)
            assert 0 < 4 * code.count("WARPGROUP.ARRIVE") <= len(re.findall("[HQ]GMMA", code)), tiles


def check_overlap(source: Source, weights: int, tmp_path: Path) -> None:
    """Check that attention of chunks spills nothing, and that a thread makes its `weights` beside products.

    The compiler likes to wait for those of values before the softmax that should run beside them.
    """
    (usage,) = resources_of(compile_source(source, "sm_90a"), tmp_path).values()
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    code = disassembled(tmp_path)
    assert 0 < 4 * code.count("WARPGROUP.ARRIVE") <= code.count("HGMMA")
    beside = [part.split("WARPGROUP.DEPBAR", 1)[0] for part in code.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]]
    assert len(beside) >= 2
    assert all(part.count("MUFU.EX2") >= weights for part in beside)


def resources_of(cubin: bytes, folder: Path) -> dict[str, dict[str, int]]:
    """Registers of a thread, and bytes of shared memory, stack and spilled values, of each kernel of a cubin."""
    (folder / _CUBIN).write_bytes(cubin)
    printed = _cuobjdump("--dump-resource-usage", folder)
    return {
        name: {each: int(value) for each, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
        for name, usage in re.findall(r"Function (\w+):\s*\n(.*)", printed)
    }


def disassembled(folder: Path) -> str:
    """The machine code of the kernel that `resources_of` was asked for last."""
    return _cuobjdump("--dump-sass", folder)


def _cuobjdump(option: str, folder: Path) -> str:
    tool = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("triton has no cuobjdump here")
    return subprocess.run([tool, option, folder / _CUBIN], capture_output=True, text=True, check=True).stdout

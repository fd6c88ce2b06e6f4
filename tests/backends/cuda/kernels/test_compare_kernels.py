"""Comparing machine code finds a changed instruction, and finds no name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from backends.cuda.kernels.compare_kernels import CAPABILITIES, code_of, differences, disassembler, native_sources
from realizar.backends.cuda.native.compiler import Source, compile_sources

_KERNEL = 'extern "C" __global__ void NAME(float* SUM, int count) {{ if (count > {limit}) *SUM += sqrtf(count); }}'


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not disassembler().exists():
        pytest.skip("triton has no cuobjdump here")


def kernel(name: str, sum_name: str, limit: int) -> Source:
    return Source(name, _KERNEL.format(limit=limit).replace("NAME", name).replace("SUM", sum_name))


def test_a_rename_is_no_difference_and_another_constant_is_one() -> None:
    sources = [kernel("first", "total", 5), kernel("second", "sum", 5), kernel("first", "total", 6)]
    one, renamed, changed = ({"kernel": code_of(cubin)[0]} for cubin in compile_sources(sources, "sm_80"))
    assert one["kernel"]["REG"] > 0
    assert differences(one, renamed) == []
    (line,) = differences(one, changed)
    assert line.startswith("kernel (first): hash ")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_source_has_a_label_of_its_own(capability: int) -> None:
    labels = [label for label, _ in native_sources(capability)]
    assert len(set(labels)) == len(labels) > 60


def test_kernels_that_come_and_go_are_named() -> None:
    before, after = {"a": {"function": "f", "REG": 8}}, {"b": {"function": "g", "REG": 8}}
    assert differences(before, after) == ["lacking: a (f)", "new: b (g)"]
    assert differences(before, {"a": {"function": "g", "REG": 9}}) == ["a (g): REG 8 -> 9"]

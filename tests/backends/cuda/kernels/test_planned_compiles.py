"""Kernels of Triton that threads compile from launches which start nothing. No GPU: compilation is stood in for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="the GPU backend needs triton")

import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from realizar.backends.cuda import load  # noqa: E402
from realizar.backends.cuda.attention import decode  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.kernels.ahead import PlannedCompiles  # noqa: E402
from realizar.backends.cuda.kernels.launched import LaunchedKernel  # noqa: E402
from realizar.backends.cuda.launch import Launch, StepKind  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.native import launcher  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.models.generated.generate import generated_header  # noqa: E402
from realizar.models.registry import build_spec  # noqa: E402
from resolving import resolved  # noqa: E402
from waits import HANG_S  # noqa: E402

HOPPER = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10
)


def kernel(x: Any, count: Any, BLOCK: Any) -> None:
    """What is compiled: its body does not matter."""


class Compiler:
    """Stands in for `JITFunction.run`: notes compilations and launches, and waits for `go` before each compilation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        monkeypatch.setattr(JITFunction, "run", lambda _kernel, *values, **options: self.run(*values, **options))

    def run(self, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not warmup:
            self.launched.append((grid, *values))
            return
        assert self.go.wait(HANG_S)
        self.compiled.append((*values[1:], options["BLOCK"]))


def test_what_the_host_launches_can_be_planned() -> None:
    folder = Path(load.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))
    starts = set(re.findall(r"\b(\w+)\[[^\n]*\]\(", text))
    assert len(starts & set(re.findall(r"@launched\S*\ndef (\w+)\(", text))) > 40
    assert not starts & set(re.findall(r"@triton\.jit\S*\ndef (\w+)\(", text))


def test_a_kernels_key_does_not_depend_on_what_was_hashed_before() -> None:
    """By Triton alone it does: a start would compile again what another one has compiled in another order."""
    keys = {LaunchedKernel: set[str](), JITFunction: set[str]()}
    for kind, found in keys.items():
        for is_hashed in (True, False):
            leaf, middle = JITFunction(_leaf), JITFunction(_middle)
            globals().update({"_leaf_of": leaf, "_middle_of": middle})
            if is_hashed:
                assert leaf.cache_key
            found.add(kind(_outer).cache_key)
    assert [len(found) for found in keys.values()] == [1, 2]


_LEAF = tl.constexpr(3)


def _leaf(x: Any) -> Any:
    return x + _LEAF


def _middle(x: Any) -> Any:
    return _leaf_of(x)  # type: ignore[name-defined]  # noqa: F821


def _outer(x: Any) -> Any:
    return _middle_of(x)  # type: ignore[name-defined]  # noqa: F821


def launches_of(*starts: Callable[[StepKind], None]) -> list[Launch]:
    return [Launch("one", start) for start in starts]


def test_each_sort_is_compiled_once_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, jit, x = Compiler(monkeypatch), LaunchedKernel(kernel), torch.zeros(4)
    body = launches_of(lambda kind: jit[(kind.tokens,)](x, kind.tokens, BLOCK=64)) * 3
    compiles, first, second = PlannedCompiles(), StepKind(1, 1), StepKind(8, 8)
    compiler.go.set()
    compiles.plan([(first, body), (second, body), (first, body)], whole=1)
    compiles.await_kind(second)
    assert (sorted(compiler.compiled), compiler.launched) == ([(1, 64), (8, 64)], [])
    jit[(2,)](x, 1, BLOCK=64)
    assert len(compiler.launched) == 1


def test_a_kind_is_waited_for_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, jit, x = Compiler(monkeypatch), LaunchedKernel(kernel), torch.zeros(4)
    body = launches_of(lambda kind: jit[(1,)](x, kind.tokens, BLOCK=64))
    compiles = PlannedCompiles()
    compiles.plan([(StepKind(1), body)], whole=1)
    compiles.await_kind(StepKind(2))
    waiting = threading.Thread(target=compiles.await_kind, args=(StepKind(1),))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert not compiles.is_compiled(StepKind(1))
    compiler.go.set()
    waiting.join(HANG_S)
    assert compiles.is_compiled(StepKind(1))
    assert compiler.compiled == [(1, 64)]


def test_other_threads_launch_while_one_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, jit, x = Compiler(monkeypatch), LaunchedKernel(kernel), torch.zeros(4)
    compiler.go.set()

    def start(_kind: StepKind) -> None:
        other = threading.Thread(target=lambda: jit[(3,)](x, 5, BLOCK=64))
        other.start()
        other.join(HANG_S)

    PlannedCompiles().plan([(StepKind(1), launches_of(start))], whole=1)
    assert [values[0] for values in compiler.launched] == [(3,)]
    assert not compiler.compiled


def test_nobody_waits_for_a_plan_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, jit, x = Compiler(monkeypatch), LaunchedKernel(kernel), torch.zeros(4)
    compiler.go.set()
    compiles = PlannedCompiles()
    good = launches_of(lambda _kind: jit[(1,)](x, 1, BLOCK=64))
    bad = launches_of(lambda _kind: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        compiles.plan([(StepKind(1), good), (StepKind(2), bad), (StepKind(4), good)], whole=3)
    for kind in (StepKind(1), StepKind(2), StepKind(4)):
        compiles.await_kind(kind)
    jit[(7,)](x, 1, BLOCK=64)
    assert [values[0] for values in compiler.launched] == [(7,)], "the thread launches again"


def test_what_has_not_begun_is_left_out_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.backends.cuda.kernels.ahead._MOST_THREADS", 1)
    compiler, jit, x = Compiler(monkeypatch), LaunchedKernel(kernel), torch.zeros(4)
    body = launches_of(lambda kind: jit[(1,)](x, kind.tokens, BLOCK=64))
    compiles = PlannedCompiles()
    compiles.plan([(StepKind(tokens), body) for tokens in range(1, 9)], whole=8)
    compiles.close()
    compiler.go.set()
    compiles._pool.shutdown(wait=True)
    assert len(compiler.compiled) <= 1


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("shape", ["small", "tiny-delta", "tiny-window"])
def test_a_load_plans_its_kernels_by_the_header(shape: str, missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of CUDA C++ for every sort of step, and where they were `missing` Triton's of every kind; no weight is
    read, and nothing fails.
    """
    begun: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HOPPER)
    for module in (launcher, decode):
        monkeypatch.setattr(
            module, "begin_compiling", lambda sources, _arch: begun.extend(each.name for each in sources)
        )
    compiled: set[str] = set()
    for run in (JITFunction, InterpretedFunction):  # the latter where other tests interpret kernels
        monkeypatch.setattr(run, "run", lambda each, *_, **__: compiled.add(each.fn.__name__))
    checkpoint = generated_header(shape)
    spec = build_spec(checkpoint)
    config = resolved(spec, None, EngineConfig(max_running=64, max_step_tokens=1024), "cuda")
    device = DeviceProfile(torch.device("cpu"), "NVIDIA H200", (9, 0), 132, 1 << 37, 227 << 10)
    compiles, kinds = PlannedCompiles(), list[StepKind]()
    plan = PlannedCompiles.plan

    def noted(self: PlannedCompiles, steps: Any, *, whole: int) -> None:
        plan(self, steps, whole=whole)
        kinds.extend(kind for kind, _ in steps)

    monkeypatch.setattr(PlannedCompiles, "plan", noted)
    monkeypatch.setattr(load, "is_compiling", lambda: missing)
    compiles.may_begin.set()
    load._compile_ahead(spec, checkpoint, config, device, MatmulKernels("cpu"), compiles)
    families = {name.partition("_")[0] for name in begun}
    assert {"matvec", "wgmma", "attend"} <= families
    compiles.await_kind(StepKind(1, 1))
    if not missing:
        assert not kinds
        assert not compiled
        return
    assert {StepKind(1, 1), StepKind(64, 64), StepKind(64, 0, 1), StepKind(1024, 0, 1), StepKind(64)} <= set(kinds)
    for kind in kinds:
        compiles.await_kind(kind)
    assert {"normalize", "rotate"} <= compiled
    if shape == "tiny-delta":
        assert "scan" in families
        assert {"recur", "recur_once"} <= compiled

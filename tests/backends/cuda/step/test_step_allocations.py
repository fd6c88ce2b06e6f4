"""A step takes no memory of the device: launches, graphs and a greedy row's token use what the load has made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.graphs import GraphRunner  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row  # noqa: E402

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

RECIPE = Recipe(32, 1, 1, 32, 64, 32, weights="Q8_0", windows=(None,), parts=("qk_norm", "biases"))
CONFIG = EngineConfig(max_running=2, max_step_tokens=16, context_length=64, kv_cache_bytes=1 << 20)
TO_THE_HOST = "aten._to_copy"  # of the sampled tokens; under the interpreter the host is the device


class Allocations(TorchDispatchMode):
    """Names of torch's operations that made memory of their own on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(found):
            on_device = isinstance(made, torch.Tensor) and (made.is_cuda or not torch.cuda.is_available())
            if on_device and made.numel() and made.untyped_storage().data_ptr() not in given:
                self.names.append(str(func).removesuffix(".default"))
        return found


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPE), CONFIG)
    made._logits = lambda first, count: None  # type: ignore[method-assign, assignment, return-value]
    taken(made)  # the first steps make what the ones after them use; on a GPU loading has done that
    yield made
    made.close()


def taken(runner: GPURunner) -> tuple[list[str], int]:
    """The operations and calls of torch's allocator of two steps: decodes, and a chunk beside a decode."""
    requests = [runner.request(row, random_tokens(RECIPE, 9, row), first=row) for row in range(2)]
    for request in requests:
        runner.backend.open(opened_row(request.row, SamplingParams(temperature=0), request.token_ids, 9))
    asked = allocator_calls()
    with Allocations() as seen:
        for parts in ([(each, 1) for each in requests], [(requests[0], 1), (requests[1], 3)]):
            assert len(runner.step(parts, sample=True)) == len(parts)
    for request in requests:
        runner.backend.close(request.row)
    return [name for name in seen.names if name != TO_THE_HOST], allocator_calls() - asked


def allocator_calls() -> int:
    """The calls of torch's allocator, also those that pass by torch's operations, as a graph's do; 0 without a GPU."""
    return torch.cuda.memory_stats()["allocation.all.allocated"] if torch.cuda.is_available() else 0


def test_a_step_takes_no_memory(runner: GPURunner) -> None:
    assert taken(runner) == ([], 0)


def test_the_counter_sees_what_a_launch_takes(runner: GPURunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no place of its own for its result."""
    run = GraphRunner.run

    def wasteful(graphs: GraphRunner, *arguments: Any) -> None:
        run(graphs, *arguments)
        graphs._space.hidden.sum(dim=1)

    monkeypatch.setattr(GraphRunner, "run", wasteful)
    names, calls = taken(runner)
    assert names == ["aten.sum.dim_IntList"] * 2
    assert calls == (2 if torch.cuda.is_available() else 0)

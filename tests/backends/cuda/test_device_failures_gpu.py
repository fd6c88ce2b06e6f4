"""A GPU that really runs out of memory, is poisoned, and is loaded and left many times."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CapacityError  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from resolving import new_core, resolved  # noqa: E402
from step_inputs import stepped  # noqa: E402
from waits import HANG_S  # noqa: E402

pytestmark = pytest.mark.gpu
RECIPE = Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="Q4_K", vocab_size=512)
CONFIG = EngineConfig(max_running=2, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20)
CYCLES = int(os.environ.get("REALIZAR_TEST_CYCLES", "12"))


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    """Whatever earlier tests kept is given back, and the limit is lifted afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def limit_to(more_bytes: int) -> None:
    """Let torch take at most `more_bytes` more than it holds."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more_bytes) / whole)


def test_a_load_that_does_not_fit_leaves_the_memory_free() -> None:
    spec, checkpoint = random_model(RECIPE)
    backend = CUDABackend()
    before = torch.cuda.memory_allocated()
    limit_to(4 << 20)
    with pytest.raises(CapacityError, match="out of memory"):
        backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    backend.shutdown()
    assert torch.cuda.memory_allocated() == before
    torch.cuda.set_per_process_memory_fraction(1.0)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    backend.shutdown()
    assert torch.cuda.memory_allocated() == before


def test_a_step_without_memory_ends_its_requests_alone() -> None:
    """Log-probabilities of many tokens need memory that is not there; what comes after is as it was before."""
    made = GPURunner(*random_model(RECIPE), CONFIG)
    core = new_core(made.backend, made.spec, CONFIG, steps_in_flight=2)

    def answer(name: str, **sampling: object) -> tuple[list[int], str | None]:
        parameters = SamplingParams(temperature=0, **sampling)  # type: ignore[arg-type]
        core.add(Request(name, (7, 8, 9, 10), parameters, 4))
        outputs = []
        while core.has_work:
            outputs += stepped(core)
            core.audit()
        return [token for output in outputs for token in output.token_ids], outputs[-1].error and outputs[
            -1
        ].error.message

    before = answer("before")
    assert before[1] is None
    held = torch.empty(0, device="cuda")
    limit_to(0)
    try:
        while True:  # what torch holds free is taken too
            held = torch.cat([held, torch.empty(1 << 16, device="cuda")])
    except torch.OutOfMemoryError:
        pass
    small = []
    try:
        while True:
            small.append(torch.empty(128, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    _, error = answer("fails", logprobs=20, min_p=0.1, repetition_penalty=1.3, top_k=7)
    assert error is not None
    assert "out of memory" in error
    del held, small
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert answer("after") == before
    core.close()


POISONED = """
import sys
sys.path[:0] = {paths!r}
import torch
from backends.cuda.cuda_runs import GPURunner
from random_models import Recipe, random_model
from realizar.config import EngineConfig
from realizar.errors import EngineDeadError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core
from step_inputs import stepped

recipe = Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="Q4_K", vocab_size=512)
config = EngineConfig(max_running=2, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20)
made = GPURunner(*random_model(recipe), config)
core = new_core(made.backend, made.spec, config, steps_in_flight=2)
core.add(Request("a", (7, 8, 9), SamplingParams(temperature=0), 50))
stepped(core)
torch.zeros(4, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]
try:
    while core.has_work:
        stepped(core)
except EngineDeadError as error:
    print(str(error).splitlines()[0])
core.close()
print("closed")
"""


def test_a_poisoned_context_ends_the_engine_and_its_process_goes_on_to_its_end() -> None:
    paths = [str(Path(__file__).parents[2]), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", POISONED.format(paths=paths)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "DeviceLostError" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("closed"), done.stderr
    assert done.returncode == 0, done.stderr


def test_many_loads_leave_nothing() -> None:
    """Memory stands still after the first loads: the device's, as its driver counts, and the host's."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("needs the device for itself: run it without -n")
    spec, checkpoint = random_model(RECIPE)
    free, resident = [], []
    for _ in range(CYCLES):
        made = GPURunner(spec, checkpoint, CONFIG)
        made.logits([1, 2, 3, 4, 5], (3, 1))
        made.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    third = CYCLES // 3
    assert min(free[third:]) >= free[third] - (2 << 20) * (1 + CYCLES // 100)
    assert resident[-1] - resident[third] <= (1 << 20) * CYCLES

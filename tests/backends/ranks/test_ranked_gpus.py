"""A model that two GPUs compute together: the same tokens, those of one, and a clean end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from backends.ranks.test_ranked_backend import (  # noqa: E402
    mixed_requests,
    rank_processes,
    run_all,
    step_on,
    texts_of,
    the_rank,
)
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.select import make_backend, plan_memory, resolve_model  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.engine.loading import find_checkpoint, load_core  # noqa: E402
from realizar.errors import CapacityError, DeviceLostError, EngineDeadError, UnsupportedModelError  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from tiny_model import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.gpu

_CONFIG = EngineConfig(
    device="cuda", tensor_parallel=2, context_length=256, max_running=4, max_step_tokens=64, kv_cache_bytes=16 << 20,
    device_check=False,
)  # fmt: skip
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["tiny", "tiny-moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks") / f"{request.param}.gguf"
    write_tiny_model(found, shape=request.param)
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks") / "tiny.gguf"
    write_tiny_model(found)
    return found


@contextmanager
def _loaded(path: Path, **changes: object) -> Iterator[EngineCore]:
    core = load_core(find_checkpoint(path), replace(_CONFIG, **changes))  # type: ignore[arg-type]
    try:
        yield core
    finally:
        core.close()


def test_the_same_bits_together_alone_and_anew(path: Path) -> None:
    """Prompts in chunks beside answers, shared prefixes, samplers, masks, more choices than rows."""
    with _loaded(path, batch_invariant=True) as core:
        together = texts_of(run_all(core, mixed_requests()))
        assert len(together) == 7
        assert texts_of(run_all(core, mixed_requests())) == together
    with _loaded(path, batch_invariant=True, prefix_cache=False, graphs=False) as core:
        alone: dict[tuple[str, int], object] = {}
        for request in mixed_requests():
            alone |= texts_of(run_all(core, [request]))
    assert alone == together


def test_log_probabilities_are_those_of_one_gpu(path: Path) -> None:
    """But for the rounding of activations; and the plan counts the weights of both."""
    prompt, found = tuple(range(3, 100)), []
    for ranks in (1, 2):
        request = Request("r", prompt, SamplingParams(temperature=0.0, prompt_logprobs=1), 1)
        with _loaded(path, tensor_parallel=ranks) as core:
            (outputs,) = run_all(core, [request]).values()
            found.append([entry.logprob for each in outputs for entry in each.prompt_logprobs])
            weight_bytes = core.capacity.weight_bytes
    alone, together = found
    assert len(alone) == len(prompt) - 1
    np.testing.assert_allclose(together, alone, atol=0.1)
    assert np.mean(np.abs(np.subtract(together, alone))) < 0.02
    checkpoint = find_checkpoint(path)
    spec, config = resolve_model(checkpoint, _CONFIG)
    assert plan_memory(spec, checkpoint, config).weight_bytes == pytest.approx(weight_bytes, rel=0.02)


def test_texts_of_drafts_from_the_text_are_those_without(tiny: Path) -> None:
    """Ranks take in what was drafted in the same step, each for itself."""
    texts = []
    for drafter in ("off", "lookup"):
        with _loaded(tiny, drafter=drafter, batch_invariant=True) as core:
            requests = [Request(f"r{row}", (5, 6, 7, 8, 5, 6, 7, 8 + row), _GREEDY, 60) for row in range(3)]
            texts.append({key: tokens for key, (tokens, _, _) in texts_of(run_all(core, requests)).items()})  # type: ignore[misc]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_load(tiny: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    load = CUDABackend.load

    def load_without_another(backend: CUDABackend, *arguments: Any) -> None:
        os.kill(the_rank(), number)
        load(backend, *arguments)

    monkeypatch.setattr(CUDABackend, "load", load_without_another)
    with pytest.raises(DeviceLostError, match=r"^rank 1 of 2 \(process \d+\) was (killed by SIGKILL|stopped)$"):
        load_core(find_checkpoint(tiny), _CONFIG)
    assert not rank_processes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_engine_and_another_follows(tiny: Path, number: signal.Signals) -> None:
    with _loaded(tiny, context_length=2048) as core:
        core.add(Request("r", (1, 2, 3), _GREEDY, 1900))
        for _ in range(5):
            core.step()
        process = the_rank()
        os.kill(process, number)
        expected = "killed by SIGKILL" if number == signal.SIGKILL else "was stopped"
        with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(process {process}\) (was )?{expected}$"):
            step_on(core)
    assert not rank_processes()
    with _loaded(tiny) as core:
        assert run_all(core, [Request("r", (1, 2, 3), _GREEDY, 8)])


def test_loads_leave_nothing(tiny: Path) -> None:
    """No process, no descriptor, no memory of the GPUs or shared by processes."""
    counts = []
    for _ in range(4):
        with _loaded(tiny) as core:
            run_all(core, mixed_requests()[:1])
        del core
        gc.collect()
        free = [torch.cuda.mem_get_info(index)[0] for index in range(2)]
        counts.append((len(list(Path("/proc/self/fd").iterdir())), *free))
        assert not rank_processes()
    assert counts[1] == counts[-1]
    assert "realizar-ranks" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_what_gpus_do_not_do_together_is_refused(tiny: Path) -> None:
    count = torch.cuda.device_count()
    checkpoint = find_checkpoint(tiny)
    with pytest.raises(CapacityError, match=f"GPU {count} can't be used"):
        load_core(checkpoint, replace(_CONFIG, device=f"cuda:{count - 1}"))
    _, config = resolve_model(checkpoint, _CONFIG)
    with pytest.raises(UnsupportedModelError, match="2 processes compute together can't sleep"):
        make_backend(config.chosen, may_sleep=True, ranks=2)

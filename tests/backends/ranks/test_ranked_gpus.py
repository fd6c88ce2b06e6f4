"""A model that two GPUs compute together: the same tokens, those of one, and a clean end."""

from __future__ import annotations

import gc
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from backends.ranks.test_ranked_backend import (  # noqa: E402
    check_log_probabilities,
    check_lost_in_load,
    check_lost_in_step,
    check_same_bits,
    check_stalled,
    loaded,
    mixed_requests,
    rank_processes,
    run_all,
    texts_of,
)
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.select import make_backend, plan_memory, resolve_model  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.loading import find_checkpoint, load_core  # noqa: E402
from realizar.errors import CapacityError, UnsupportedModelError  # noqa: E402
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


_loaded = partial(loaded, _CONFIG)


def test_the_same_bits_together_alone_and_anew(path: Path) -> None:
    check_same_bits(replace(_CONFIG, batch_invariant=True), path, graphs=False)


def test_log_probabilities_are_those_of_one_gpu(path: Path) -> None:
    """And the plan counts the weights of both."""
    _, weight_bytes = check_log_probabilities(_CONFIG, path)
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
    check_lost_in_load(_CONFIG, tiny, CUDABackend, monkeypatch, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_engine_and_another_follows(tiny: Path, number: signal.Signals) -> None:
    check_lost_in_step(_CONFIG, tiny, number)
    with _loaded(tiny) as core:
        assert run_all(core, [Request("r", (1, 2, 3), _GREEDY, 8)])


def test_a_rank_that_stalls_ends_the_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the other's kernels, which wait for its sums."""
    check_stalled(_CONFIG, tiny, monkeypatch, "a rank of 2 sent no sums for which the others waited$")


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

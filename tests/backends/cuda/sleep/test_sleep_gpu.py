"""Models that sleep on a real GPU: the same answers afterwards, from graphs captured before, and memory given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.sleep.fake_driver import device_bytes, host_bytes  # noqa: E402
from backends.draft_models import assistant_head, dflash_head, eagle3_head, itself, next_token_block  # noqa: E402
from engine.core.core_runs import run, tokens  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.base import NO_OTHERS, ModelSource  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.sleep.driver import CUDADriver  # noqa: E402
from realizar.backends.cuda.sleep.load_memory import (  # noqa: E402
    Segments,
    SleepingMemory,
)
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.errors import CapacityError, UnsupportedModelError  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from resolving import new_core, resolved  # noqa: E402

pytestmark = pytest.mark.gpu
DENSE = Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="Q4_K", vocab_size=512)
RECIPES = {
    "Q4_K": DENSE,
    "bf16": replace(DENSE, weights="BF16"),
    "Q8_0": replace(DENSE, weights="Q8_0"),
    "experts": replace(DENSE, experts=8, windows=(None, 40, None)),
}
CONFIG = EngineConfig(max_running=4, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20, prefix_cache=False)
OPTIONS: list[dict[str, object]] = [
    {}, {"graphs": False}, {"batch_invariant": True}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"},
]  # fmt: skip
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
)


@pytest.fixture(autouse=True)
def all_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


DRAFTED = replace(DENSE, hidden_size=512, windows=(40, None, None))
DRAFTERS = {
    "model": itself(DRAFTED), "block": next_token_block(DRAFTED), "eagle3": eagle3_head(DRAFTED, of_state=None),
    "dflash": dflash_head(DRAFTED), "assistant": assistant_head(DRAFTED, of_state=None),
}  # fmt: skip


def load(
    recipe: Recipe, *, may_sleep: bool = True, drafter: ModelSource | None = None, **fields: object
) -> tuple[EngineCore, CUDABackend]:
    config = replace(CONFIG, **fields)  # type: ignore[arg-type]
    spec, checkpoint = random_model(recipe)
    backend = CUDABackend(may_sleep=may_sleep)
    others = NO_OTHERS if drafter is None else {"drafter": drafter}
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config, "cuda"), others)
    return new_core(backend, spec, config, steps_in_flight=2), backend


def segments_of(backend: CUDABackend) -> Segments:
    memory = backend._memory
    assert isinstance(memory, SleepingMemory)
    return memory._segments


def answers(core: EngineCore) -> dict[str, list[int]]:
    """Tokens of requests with long and short prompts, one after another: the bits of a row depend on its batch."""
    found = {}
    for number, sampling in enumerate(SAMPLINGS):
        core.add(Request(f"{number}", tuple(range(3, 8 + 40 * number)), sampling, 20))
        found |= {name: tokens(outputs) for name, outputs in run(core).items()}
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", RECIPES)
def test_answers_are_the_same_after_each_sleep(kind: str, options: dict[str, object]) -> None:
    core, backend = load(RECIPES[kind], **options)
    segments = segments_of(backend)
    wanted, taken = answers(core), device_bytes(segments)
    assert answers(core) == wanted
    for _ in range(2):
        done = core.sleep()
        assert device_bytes(segments) == 0
        assert 0 < done.num_bytes == host_bytes(segments) < taken
        others = [
            torch.full((taken // 4,), float("nan"), device="cuda") for _ in range(2)
        ]  # whoever has the memory now
        del others
        torch.cuda.empty_cache()
        assert core.wake().num_bytes == done.num_bytes
        assert device_bytes(segments) == taken
        assert answers(core) == wanted
    core.close()
    assert device_bytes(segments) == host_bytes(segments) == 0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_sleeps_with_its_model(kind: str) -> None:
    """Both have one memory, and answers are those without drafts before and after."""
    options: dict[str, object] = {"batch_invariant": True, "prefix_cache": True}
    plain, backend = load(DRAFTED, **options)
    wanted, alone = answers(plain), device_bytes(segments_of(backend))
    plain.close()
    core, backend = load(DRAFTED, drafter=DRAFTERS[kind], speculative_tokens=3, **options)
    segments = segments_of(backend)
    taken = device_bytes(segments)
    assert taken > alone
    for _ in range(2):
        assert answers(core) == wanted
        core.sleep()
        assert device_bytes(segments) == 0
        core.wake()
        assert device_bytes(segments) == taken
    assert answers(core) == wanted
    counts = core.scheduler.counts
    assert counts.draft_tokens > 0
    assert kind != "model" or counts.accepted_tokens > 10
    core.audit()
    core.close()
    assert device_bytes(segments) == host_bytes(segments) == 0


def test_a_model_loaded_to_sleep_answers_as_any_other() -> None:
    core, _ = load(DENSE)
    other, backend = load(DENSE, may_sleep=False)
    assert answers(core) == answers(other)
    with pytest.raises(UnsupportedModelError, match="was not loaded so that"):
        backend.sleep()
    core.close()
    other.close()


def test_a_gpu_without_room_leaves_the_model_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    core, backend = load(DENSE)
    wanted = answers(core)
    core.sleep()
    driver = segments_of(backend)._driver
    real, calls = driver.map, []

    def short(address: int, size_bytes: int) -> object:
        calls.append(address)
        if len(calls) == 3:
            return real(address, 1 << 50)  # the driver refuses it
        return real(address, size_bytes)

    monkeypatch.setattr(driver, "map", short)
    with pytest.raises(CapacityError, match="out of memory"):
        core.wake()
    assert device_bytes(segments_of(backend)) == 0
    core.wake()
    assert answers(core) == wanted
    core.close()


def test_a_load_that_does_not_fit_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = CUDADriver.map, []

    def short(driver: CUDADriver, address: int, size_bytes: int) -> object:
        calls.append(address)
        return real(driver, address, 1 << 50 if len(calls) > 4 else size_bytes)

    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(CUDADriver, "map", short)
    with pytest.raises(CapacityError, match="out of memory"):
        load(DENSE)
    monkeypatch.undo()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before
    load(DENSE)[0].close()

"""A model on the second of two cards: chosen by its number, stepped by any thread, beside one on the first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.device_choice import choose_device  # noqa: E402
from realizar.backends.select import make_backend  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from resolving import new_core, resolved  # noqa: E402
from step_inputs import stepped  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPES = {
    "quantised": Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="Q4_K", vocab_size=512),
    "floats": Recipe(64, 4, 1, hidden_size=256, feed_forward_size=512, weights="BF16", vocab_size=512),
}
CONFIG = EngineConfig(max_running=4, max_step_tokens=64, context_length=256, kv_cache_bytes=8 << 20)


def load(name: str, device: str) -> EngineCore:
    chosen = choose_device(device)
    spec, checkpoint = random_model(RECIPES[name])
    backend = make_backend(chosen)
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    return new_core(backend, spec, CONFIG, steps_in_flight=2, device=chosen)


def answers(core: EngineCore) -> list[list[int]]:
    """Tokens of requests that run together, greedy and drawn."""
    samplings = (
        SamplingParams(temperature=0), SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=2, dry_multiplier=0.8)
    )  # fmt: skip
    found: dict[str, list[int]] = {}
    for index, sampling in enumerate(samplings):
        core.add(Request(str(index), (7 + index, 8, 9), sampling, 12))
        found[str(index)] = []
    while core.has_work:
        for output in stepped(core):
            assert output.error is None
            found[output.request_id] += output.token_ids
    return list(found.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_second_card_gives_what_the_first_gives(name: str) -> None:
    """Steps run on the thread that loaded, and on another, whose current GPU is the first."""
    before = torch.cuda.memory_allocated(0)
    second = load(name, "cuda:1")
    assert second.config.chosen.label.startswith("cuda:1, ")
    assert torch.cuda.memory_allocated(0) == before, "nothing of it lies on the first card"
    assert torch.cuda.current_device() == 0
    first = load(name, "cuda:0")
    expected = answers(first)
    assert answers(second) == expected
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answers, second).result() == expected
    assert second.device_memory is not None
    second.close()
    assert answers(first) == expected
    first.close()
    assert torch.cuda.memory_allocated(1) <= (0 if name == "quantised" else 128 << 20), "cuBLAS keeps its workspaces"

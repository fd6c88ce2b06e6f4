"""Embeddings that requests bring, on a GPU: the bits of their ids, in the graphs that ids have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.step.given_runs import given_core, given_model, requests_of, texts_of  # noqa: E402
from random_models import Recipe  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.gpu

MODELS = {
    "plain": (Recipe(weights="Q4_K"), 1.0),
    "scaled": (Recipe(weights="BF16"), 4.0),
    "inputs of layers": (
        Recipe(weights="Q8_0", windows=(None, None), parts=("qk_norm",), sources=(None, 0), input_size=256), 4.0
    ),
    "hybrid": (
        Recipe(
            weights="Q8_0", windows=(None,) * 3, recurrent=("convolution", None, "delta"), key_size=128, value_size=128
        ),
        1.0,
    ),
}  # fmt: skip
CONFIG = EngineConfig(
    max_running=8, max_step_tokens=256, kv_cache_bytes=64 << 20, context_length=512
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_of_ids_give_the_bits_of_ids(name: str) -> None:
    """With prompts in chunks beside others' decodes, and from the blocks that the first time left."""
    spec, checkpoint = given_model(*MODELS[name])
    texts = []
    for given in (None, checkpoint):
        runner = GPURunner(spec, checkpoint, CONFIG)
        core = given_core(runner)
        texts.append(texts_of(core, requests_of(runner, given, 12, 40)))
        core.close()
    assert texts[1] == texts[0]
    assert sum(cached for _, _, cached in texts[1].values()) >= 12 * 16


def test_a_step_with_embeddings_replays_the_graph_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings are copied before; steps of decodes alone copy nothing."""
    spec, checkpoint = given_model(*MODELS["plain"])
    runner = GPURunner(spec, checkpoint, CONFIG)
    graphs, core = runner.backend.model.graphs, given_core(runner)
    replay, replayed, placed = graphs.replay, list[bool](), list[int]()
    place = runner.backend.model.space.place_given

    def replay_noted(kind: StepKind) -> bool:
        replayed.append(replay(kind))
        return replayed[-1]

    def place_noted() -> None:
        placed.append(len(replayed))
        place()

    monkeypatch.setattr(graphs, "replay", replay_noted)
    monkeypatch.setattr(runner.backend.model.space, "place_given", place_noted)
    texts_of(core, requests_of(runner, checkpoint, 12, 4))
    core.close()
    assert all(replayed)
    assert 0 < len(placed) < len(replayed)
    assert len(set(placed)) == len(placed)

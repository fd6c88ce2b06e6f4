"""Embeddings that requests bring, interpreted: the bits of their ids, also beside graphs, which leave them alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.step.given_runs import given_core, given_model, requests_of, texts_of  # noqa: E402
from random_models import Recipe  # noqa: E402
from realizar.backends.cuda.graphs import GraphRunner  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.shapes import chunk_kinds  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from wider import wider  # noqa: E402

SMALL = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="F32", windows=(None, 5))
MODELS = {
    "plain": (SMALL, 1.0),
    "scaled": (Recipe(32, 2, 1, 64, 96, 48, weights="Q8_0", windows=(None,)), 4.0),
    "inputs of layers": (Recipe(32, 2, 1, 64, 96, 48, (None, None), "F32", sources=(None, 0), input_size=32), 4.0),
    "hybrid": (Recipe(32, 2, 1, 64, 96, 48, (None, None), "F32", recurrent=("convolution", None)), 1.0),
}
CONFIG = EngineConfig(
    threads=1, max_running=4, max_step_tokens=32, kv_cache_bytes=2 << 20, context_length=64, kv_cache_dtype="f16",
    block_size=16,
)  # fmt: skip


@pytest.mark.parametrize("name", wider(MODELS, "plain", "scaled", "inputs of layers", "hybrid"))
def test_embeddings_of_ids_give_the_bits_of_ids(name: str) -> None:
    """With prompts in chunks beside others' decodes, and from the blocks that the first time left."""
    spec, checkpoint = given_model(*MODELS[name])
    texts = []
    for given in (None, checkpoint):
        runner = GPURunner(spec, checkpoint, CONFIG)
        core = given_core(runner)
        texts.append(texts_of(core, requests_of(runner, given, 1, 3)))
        core.close()
    assert texts[1] == texts[0]
    assert sum(cached for _, _, cached in texts[1].values()) >= 32


class Walked:
    """A stand-in for a graph: it runs the launches of its kind, and counts."""

    def __init__(self, graphs: GraphRunner, kind: StepKind, seen: list[StepKind]) -> None:
        self._graphs, self._kind, self._seen = graphs, kind, seen

    def replay(self) -> None:
        self._seen.append(self._kind)
        self._graphs.run_eagerly(self._kind, self._kind.tokens if not self._kind.tiles else 0)


def test_a_step_with_embeddings_takes_the_graph_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what the launches one by one give, and so does a step after it without any."""
    spec, checkpoint = given_model(*MODELS["scaled"])
    runner = GPURunner(spec, checkpoint, CONFIG)
    core = given_core(runner)
    expected = texts_of(core, requests_of(runner, checkpoint, 1, 3))
    core.clear_cache()
    graphs, seen, embedding = runner.backend.model.graphs, list[StepKind](), list[StepKind]()
    kinds = [*chunk_kinds(runner.backend.model.space.arrays.sizes), *(StepKind(rows, rows) for rows in (1, 2, 4))]
    monkeypatch.setattr(graphs, "_graphs", {kind: Walked(graphs, kind, seen) for kind in kinds})
    start = graphs.run

    def noted(kind: StepKind, selected: int) -> None:
        embedding.append(kind)
        start(kind, selected)

    monkeypatch.setattr(graphs, "run", noted)
    assert texts_of(core, requests_of(runner, checkpoint, 1, 3)) == expected
    core.close()
    assert len(seen) == len(embedding)
    assert not any(kind.embeds for kind in seen)
    assert {kind.embeds for kind in embedding} == {True, False}


def test_steps_without_embeddings_are_of_the_kinds_that_they_were() -> None:
    """Nothing is started or copied for them beside what ids need, and a step of both starts one launch more."""
    spec, checkpoint = given_model(*MODELS["plain"])
    runner = GPURunner(spec, checkpoint, CONFIG)
    graphs, arrays = runner.backend.model.graphs, runner.backend.model.space.arrays
    plain, both = (graphs.launches(StepKind(16, 0, 1, embeds=embeds), 1) for embeds in (False, True))
    assert [launch.name for launch, _ in both] == ["given embeddings", *(launch.name for launch, _ in plain)]
    assert [kind for _, kind in both[1:]] == [kind for _, kind in plain]
    core = given_core(runner)
    texts_of(core, requests_of(runner, checkpoint, 1, 1)[2:3])
    texts_of(core, requests_of(runner, None, 1, 1)[:1])
    assert not arrays.given
    core.close()

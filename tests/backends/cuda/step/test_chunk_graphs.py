"""Graphs of steps with chunks: which there are, which one a step takes, what it is padded with, what comes out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backend_runs import Request  # noqa: E402
from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.device import interpreter_device  # noqa: E402
from realizar.backends.cuda.graphs import GraphRunner  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.backends.cuda.shapes import (  # noqa: E402
    chunk_kinds,
    least_holding,
    padded_rows,
    padded_tokens,
    row_counts,
    token_counts,
)
from realizar.backends.cuda.step_arrays import StepArrays, StepSizes, tiles_of  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row, scheduled_row, step_input  # noqa: E402

RECIPE = Recipe(
    32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(9,),
    parts=("sinks", "qk_norm"),
)  # fmt: skip
CONFIG = EngineConfig(max_running=4, max_step_tokens=32, context_length=64, kv_cache_dtype="f16", block_size=16)


def sizes_of(tokens: int, rows: int, tile_tokens: int = 32) -> StepSizes:
    return StepSizes(tokens, rows, max(32, rows), rows + tokens // tile_tokens + 1, 1, 40, tile_tokens)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(512, 64), (2048, 256), (4096, 64), (512, 1), (48, 6), (336, 300), (512, 512), (1100, 20)]
)
def test_every_step_with_a_chunk_has_a_graph(tokens: int, rows: int) -> None:
    """The graph has as many padded tokens as the step alone, while no more than 16 requests begin at once."""
    sizes = sizes_of(tokens, rows)
    kinds = chunk_kinds(sizes)
    assert len(kinds) == len(set(kinds)) <= (54 if rows <= 64 else 71)
    assert {kind.decodes for kind in kinds} <= {0, *row_counts(rows)}
    assert {kind.tokens for kind in kinds} <= set(token_counts(tokens))
    assert all(kind.tiles <= sizes.tiles for kind in kinds)
    for count in range(2, min(2048, tokens) + 1):
        for decodes in {0, 1, 2, 7, 9, 16, 17, 60, 65, 100, 255, count - 2}:
            chunks = min(rows - decodes, 16, (count - decodes) // 2)
            if decodes < 0 or chunks < 1:
                continue
            tiles = (count - decodes) // 32 + chunks
            step = StepKind(padded_tokens(count, tokens), padded_rows(decodes, rows), min(tiles, sizes.tiles))
            found = least_holding(step, kinds)
            assert found is not None
            assert found.tokens == step.tokens
            assert decodes <= found.decodes <= max(16 if count <= 512 else 64, 8 * decodes)


def test_the_least_graph_that_holds_a_step() -> None:
    kinds = [StepKind(64, 64, 18), StepKind(64, 0, 18), StepKind(64, 8, 18), StepKind(128, 8, 20)]
    kinds += [StepKind(64, 64, 0), StepKind(16, 16, 0)]
    assert least_holding(StepKind(64, 0, 2), kinds) == StepKind(64, 0, 18)
    assert least_holding(StepKind(64, 1, 18), kinds) == StepKind(64, 8, 18)
    assert least_holding(StepKind(64, 16, 1), kinds) == StepKind(64, 64, 18)
    assert least_holding(StepKind(128, 4, 20), kinds) == StepKind(128, 8, 20)
    for without in (StepKind(128, 16, 1), StepKind(64, 0, 19), StepKind(192, 0, 1), StepKind(16, 16, 1)):
        assert least_holding(without, kinds) is None


def test_a_shape_without_a_graph_is_as_it_was() -> None:
    graphs = GraphRunner([], [], None, interpreter_device())  # type: ignore[arg-type]
    assert graphs.padded(StepKind(64, 4, 3)) == StepKind(64, 4, 3)
    graphs._graphs = {StepKind(64, 8, 18): None}  # type: ignore[dict-item]
    assert graphs.padded(StepKind(64, 4, 3)) == StepKind(64, 8, 18)
    assert graphs.padded(StepKind(64, 16, 3)) == StepKind(64, 16, 3)


def test_padding_is_dead() -> None:
    """Padding replaces the values of a larger step: tokens without a slot, decodes and tiles of no row."""
    arrays = StepArrays(sizes_of(64, 8, 8), interpreter_device())
    for name in ("ids", "positions", "slots", "decodes", "tile_rows", "tile_firsts", "selected_rows", "token_rows"):
        arrays[name].fill_(7)
        for host in arrays._host:
            host[arrays._places[name]] = 7
    rows = (scheduled_row(3, (0,), 20, True), scheduled_row(5, range(1, 10), 0, True))
    places = np.array([20, *range(9)], np.int32)
    step = step_input(rows, (places + 64,), (np.ones((2, 2), np.int32),))
    assert tiles_of(step, 8) == [(1, 8), (1, 0)]
    arrays.send(step, StepKind(16, 8, 6), [0, 9], [3, 5])
    assert arrays["decodes"].reshape(8, 4).tolist() == [[0, 0, 21, 20], *[[-1] * 4] * 7]
    assert arrays["tile_rows"][:6].tolist() == [1, 1, *[-1] * 4]
    assert arrays["tile_firsts"][:6].tolist() == [8, 0, *[0] * 4]
    assert arrays.slots(0)[:16].tolist() == [*(places + 64), *[-1] * 6]
    assert arrays["ids"][:16].tolist() == [*range(10), *[0] * 6]
    assert arrays["positions"][:16].tolist() == [*places, *[0] * 6]
    assert arrays["token_rows"][:16].tolist() == [0] * 16
    assert arrays["selected_rows"].tolist() == [3, 5, *[-1] * 30]


class Walked:
    """A stand-in for a graph: it runs the launches of its shape, and counts."""

    def __init__(self, graphs: GraphRunner, kind: StepKind, seen: list[StepKind]) -> None:
        self._graphs, self._kind, self._seen = graphs, kind, seen

    def replay(self) -> None:
        self._seen.append(self._kind)
        self._graphs.run_eagerly(self._kind, 0)


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPE), CONFIG)
    yield made
    made.close()


def poison(runner: GPURunner) -> None:
    """Poison the buffers that a step must write before it reads."""
    space = runner.backend.model.space
    for buffer in (space.hidden, space.query, space.attended, space.partial_sums, space.attention_parts, space.logits):
        buffer.fill_(float("nan"))


def serve(runner: GPURunner) -> tuple[list[Request], list[list[int]]]:
    """Requests that begin beside decodes of others: steps of a chunk alone, of both kinds, of several chunks."""
    prompts = [random_tokens(RECIPE, length, seed) for seed, length in enumerate((11, 13, 2, 9))]
    a, b, c, d = (runner.request(row, ids, first=3 * row) for row, ids in enumerate(prompts))
    for request in (a, b, c, d):
        runner.backend.open(opened_row(request.row, SamplingParams(temperature=0), request.token_ids))
    sampled = []
    for parts in ([(a, 9)], [(a, 1), (b, 5)], [(a, 1), (b, 8), (c, 2), (d, 9)]):
        poison(runner)
        sampled.append(runner.step(parts, sample=True))
    for request in (a, b, c, d):
        runner.backend.close(request.row)
    return [a, b, c, d], sampled


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of padding, which holds what was not written
def test_a_padded_step_gives_what_the_step_gives(runner: GPURunner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, tokens = serve(runner)
    graphs, seen = runner.backend.model.graphs, []
    kinds = chunk_kinds(runner.backend.model.space.arrays.sizes)
    made = {kind: Walked(graphs, kind, seen) for kind in kinds}
    monkeypatch.setattr(graphs, "_graphs", made)
    found, same_tokens = serve(runner)
    assert [(kind.tokens, kind.decodes) for kind in seen] == [(16, 0), (8, 4), (32, 4)]
    assert same_tokens == tokens
    for request, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(request.values(), wanted.values(), rtol=1e-4, atol=1e-4)

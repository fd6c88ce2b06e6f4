"""Graphs of steps with chunks on a GPU: the bits of their launches one by one, for every padded number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backend_runs import Request  # noqa: E402
from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.launch import StepKind  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import opened_row  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPES = {
    "q4_k-128-gqa4": Recipe(128, 8, 2, weights="Q4_K", windows=(None, None)),
    "q6_k-64-norms": Recipe(64, 4, 2, weights="Q6_K", windows=(None, None), parts=("post_norms", "qk_norm", "sinks")),
    "bf16-64-gqa4": Recipe(64, 8, 2, weights="BF16", windows=(None, None), parts=("biases",)),
}
TOKENS = 1024  # of every request: none of the steps below asks for more than it has
POISONED = ("hidden", "query", "attended", "partial_sums", "attention_parts", "attention_state", "logits", "sampled")


def worst_error(found: np.ndarray, expected: np.ndarray) -> float:
    errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.nan_to_num(errors, nan=np.inf).max())


def mixed_step(requests: list[Request], tokens: int, decodes: int, chunks: int) -> list[tuple[Request, int]]:
    """The next tokens of so many requests one by one, and of others in chunks, `tokens` in all, in mixed order."""
    begun = sorted(requests, key=lambda request: -request.computed)
    left = tokens - decodes
    parts = [(request, 1) for request in begun[:decodes]]
    sizes = [left // chunks + (left % chunks if index == 0 else 0) for index in range(chunks)]
    parts += zip(begun[::-1], sizes, strict=False)
    return parts[::2] + parts[1::2]


@pytest.mark.parametrize("name", RECIPES)
def test_graphs_of_steps_with_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of their launches one by one, whatever lay in the buffers, and the tokens that the logits give."""
    recipe, rows = RECIPES[name], 24
    config = EngineConfig(max_running=rows, max_step_tokens=640, kv_cache_bytes=256 << 20)
    runner = GPURunner(*random_model(recipe), config)
    graphs, space = runner.backend.model.graphs, runner.backend.model.space
    assert min(runner.capacity.num_blocks) >= 32 * rows
    requests = [runner.request(row, random_tokens(recipe, TOKENS, row), first=32 * row) for row in range(rows)]
    for request in requests:
        runner.backend.open(opened_row(request.row, SamplingParams(temperature=0), request.token_ids, TOKENS))
    replay, seen = graphs.replay, []

    def noted(kind: StepKind) -> bool:
        if kind.tiles:  # others are of the logits
            seen.append(kind)
        return replay(kind)

    for tokens in (3, 5, 16, 31, 64, 65, 128, 129, 192, 256, 300, 384, 448, 512, 600):
        for decodes, chunks in ((0, 1), (1, 1), (2, 3), (9, 2), (20, 3)):
            if tokens < decodes + 2 * chunks:
                continue
            parts = mixed_step(requests, tokens, decodes, chunks)
            found = []
            for run in (noted, lambda _kind: False):
                monkeypatch.setattr(graphs, "replay", run)
                for buffer in POISONED:
                    getattr(space, buffer).fill_(float("nan") if getattr(space, buffer).is_floating_point() else 7)
                sampled = runner.step(parts, sample=True)
                found.append((sampled, [request.logits.pop() for request, _ in parts]))
                for request, count in parts:
                    request.computed -= count
            for request, count in parts:
                request.computed += count
            (sampled, logits), (sampled_eagerly, logits_eagerly) = found
            if recipe.weights != "BF16":  # cuBLAS may choose another algorithm in a graph
                assert sampled == sampled_eagerly
                for values, values_eagerly in zip(logits, logits_eagerly, strict=True):
                    assert np.array_equal(values.view(np.uint32), values_eagerly.view(np.uint32)), (tokens, decodes)
            assert max(map(worst_error, logits, logits_eagerly)) <= 0.01, (tokens, decodes)
            for token_id, values in zip(sampled, logits, strict=True):  # from a matmul of other rows: near ties
                assert values[-1].max() - values[-1][token_id] <= 0.3 * values[-1].std()
    assert all(kind in graphs._graphs for kind in seen if kind.tokens <= 512)
    assert {kind.tokens for kind in seen} == {4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640}
    runner.close()

"""With `batch_invariant` a request's logits have the same bits whatever else runs, and in whatever chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from numpy.typing import NDArray  # noqa: E402

from backend_runs import Request  # noqa: E402
from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTH = 600  # tokens of a request: more than one part of a context
RECIPES = {
    "q4_k": Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="Q4_K", windows=(None, None)),
    "q4_k-biases": Recipe(64, 16, 4, hidden_size=512, weights="Q4_K", parts=("biases", "qk_norm")),
    "q6_k-96-window": Recipe(96, 8, 8, weights="Q6_K", windows=(None, 270), parts=("post_norms",)),
    "q8_0-sinks": Recipe(64, 8, 1, weights="Q8_0", windows=(300, None), parts=("sinks", "soft_cap")),
    "iq4_nl-256": Recipe(256, 3, 1, weights="IQ4_NL", parts=("partial_rope", "interleaved")),
    "bf16": Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="BF16", windows=(None, None)),
    "bf16-layer": Recipe(64, 6, 1, weights="BF16", parts=("layer_norm", "ungated"), activation="gelu"),
    "f16": Recipe(64, 4, 2, weights="F16", windows=(None, 40)),
    "f32": Recipe(64, 4, 2, weights="F32", windows=(None, 40)),
}
Cut = Sequence[int]
TURNS: dict[str, Cut] = {
    "two chunks": (301, 299),
    "single tokens between chunks": (1, 1, 97, 1, 128, 1, 1, 300, 70),
    "chunks of every size": (2, 3, 5, 17, 33, 65, 129, 191, 1, 154),
    "one by one at the end": (560, *[1] * 40),
}


class Load:
    """A model, and requests that run beside the one that is looked at."""

    def __init__(self, recipe: Recipe, kv: str) -> None:
        config = EngineConfig(
            max_running=48, max_step_tokens=1536, kv_cache_bytes=256 << 20, kv_cache_dtype=kv,  # type: ignore[arg-type]
            batch_invariant=True,
        )  # fmt: skip
        self.recipe = recipe
        self.runner = GPURunner(*random_model(recipe), config)
        self.size = -(-LENGTH // config.block_size)
        self.ids = random_tokens(recipe, LENGTH, 77)

    def target(self, row: int = 0) -> Request:
        return self.runner.request(row, self.ids)

    def others(self, count: int) -> list[Request]:
        """Requests that are read up to their last 60 tokens."""
        made = [
            self.runner.request(1 + i, random_tokens(self.recipe, 64 + i, i), first=(1 + i) * self.size)
            for i in range(count)
        ]
        self.runner.step([(each, 4 + i) for i, each in enumerate(made)])
        return made

    def alone(self, cut: Cut) -> NDArray[np.float32]:
        request = self.target()
        for count in cut:
            self.runner.step([(request, count)])
        return request.values()

    def beside_decodes(self, cut: Cut, count: int) -> NDArray[np.float32]:
        request, others = self.target(), self.others(count)
        for tokens in cut:
            beside = [(each, 1) for each in others if each.computed < len(each.token_ids)]
            self.runner.step([*beside[::2], (request, tokens), *beside[1::2]])
        return request.values()

    def beside_chunks(self, cut: Cut) -> NDArray[np.float32]:
        request = self.target()
        first = 1
        for tokens in cut:
            lengths = [3, 40, 130][: 1 + first % 3]
            beside = [
                (self.runner.request(1 + i, random_tokens(self.recipe, n, first + i), first=(1 + i) * self.size), n)
                for i, n in enumerate(lengths)
            ]
            self.runner.step([*beside[:1], (request, tokens), *beside[1:]])
            first += 1
        return request.values()

    def after_prefix(self, shared: int, cut: Cut) -> NDArray[np.float32]:
        """A request that begins after `shared` tokens which another has left in the cache."""
        first = self.target()
        self.runner.step([(first, LENGTH)])
        again = self.runner.request(3, self.ids)
        again.computed = shared
        for count in cut:
            self.runner.step([(again, count)])
        return again.values()


WAYS: dict[str, Callable[[Load], NDArray[np.float32]]] = {
    **{name: lambda load, cut=cut: load.alone(cut) for name, cut in TURNS.items()},
    "decodes beside one decode": lambda load: load.beside_decodes((560, *[1] * 40), 1),
    "decodes beside 40 decodes": lambda load: load.beside_decodes((560, *[1] * 40), 40),
    "chunks beside decodes": lambda load: load.beside_decodes((1, 299, 64, 1, 235), 7),
    "decodes beside chunks": lambda load: load.beside_chunks((560, *[1] * 40)),
    "chunks beside chunks": lambda load: load.beside_chunks((100, 1, 399, 30, 70)),
    "after a prefix": lambda load: load.after_prefix(352, (1, 150, 97)),
    "all but one token cached": lambda load: load.after_prefix(599, (1,)),
}


def tokens_that_differ(found: NDArray[np.float32], expected: NDArray[np.float32]) -> int:
    """Number of tokens whose logits differ in any bit."""
    expected = expected[len(expected) - len(found) :]
    return int((found.view(np.uint32) != expected.view(np.uint32)).any(axis=1).sum())


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("name", RECIPES)
def test_logits_do_not_depend_on_anything_else(name: str, kv: str) -> None:
    load = Load(dataclasses.replace(RECIPES[name], vocab_size=416), kv)
    expected = load.alone((LENGTH,))
    assert np.isfinite(expected).all()
    differing = {way: tokens_that_differ(run(load), expected) for way, run in WAYS.items()}
    load.runner.close()
    assert not any(differing.values()), {way: count for way, count in differing.items() if count}

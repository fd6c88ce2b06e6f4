"""A prefix cache that outlives an engine on a GPU: with one order of sums texts have a fresh one's bits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import new_backend  # noqa: E402
from backends.cuda.recurrences.test_hybrid_engine_gpu import RECIPES  # noqa: E402
from backends.cuda.step.test_draft_model_gpu import RECIPE  # noqa: E402
from backends.draft_models import itself  # noqa: E402
from engine.core.conversations import Chat  # noqa: E402
from engine.core.test_disk_cache import PROMPT, FetchingCore, ask, save  # noqa: E402
from engine.core.test_hybrid_conversations import compare  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core import disk_cache  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.kv_cache.block_files import BlockFiles  # noqa: E402
from realizar.scheduler.pace import Policy  # noqa: E402
from resolving import resolved  # noqa: E402

pytestmark = pytest.mark.gpu

KINDS: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "attention": (RECIPE, {}),
    "int8": (RECIPE, {"kv_cache_dtype": "int8"}),
    "fp8": (RECIPE, {"kv_cache_dtype": "fp8"}),
    "drafter": (RECIPE, {"speculative_tokens": 2}),
    "hybrid": (replace(RECIPES["delta-nets"], vocab_size=128), {}),
}


def make_core(name: str, folder: Path | None, **options: Any) -> EngineCore:
    recipe, own = KINDS[name]
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        max_step_tokens=96, kv_cache_bytes=64 << 20, context_length=640, batch_invariant=True, graphs=False,
        **{"max_running": 5, "speculative_tokens": 0, **own, **options},
    )  # fmt: skip
    settled, backend = replace(resolved(spec, checkpoint, config, "cuda"), steps_in_flight=2), new_backend()
    backend.load(spec, checkpoint, settled, {"drafter": itself(recipe)} if name == "drafter" else {})
    files = None if folder is None else BlockFiles(folder, "model", 1 << 30)
    policy = Policy(stretch=math.inf, measures_drafts=False)
    return FetchingCore(backend, spec, settled, policy=policy, files=files)


@pytest.mark.parametrize("name", KINDS)
def test_a_new_engine_starts_from_what_the_last_one_computed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1)
    first = make_core(name, tmp_path)
    texts = [ask(first, "a", PROMPT, prompt_marks=(256,)), ask(first, "b", (*PROMPT[:256], 5, 6, 7))]
    save(first)
    first.close()
    second = make_core(name, tmp_path)
    found = [ask(second, "b", (*PROMPT[:256], 5, 6, 7)), ask(second, "a", PROMPT)]
    assert found == [(texts[1][0], 256), (texts[0][0], 288)]
    assert second.disk_counts.fetched > 8
    second.close()


@pytest.mark.parametrize("name", ["attention", "hybrid"])
def test_random_conversations_over_restarts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are in flight, and blocks are written and read beside them."""
    monkeypatch.setattr(disk_cache, "_BUSY_S", 0.0)
    monkeypatch.setattr(disk_cache, "_BATCH_BYTES", 1 << 20)
    chat: Chat | None = None
    fetched = 0
    for incarnation in range(4):
        core = make_core(name, tmp_path)
        chat = chat or Chat(5, core, scale=4)
        chat.core = core
        chat.run_until(12 * (incarnation + 1), all_ended=incarnation == 3)
        if incarnation % 2:
            save(core)
        fetched += core.disk_counts.fetched
        core.close()
    assert chat is not None
    assert fetched > 5
    fresh = make_core(name, None, max_running=1, prefix_cache=False)
    compare(chat, fresh)
    fresh.close()

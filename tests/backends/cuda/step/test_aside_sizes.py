"""Which models' prompts are read beside steps: those whose chunks share nothing with steps that was not shown right."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.shapes import aside_sizes, step_sizes  # noqa: E402
from realizar.backends.cuda.step_arrays import StepSizes  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from resolving import resolved  # noqa: E402

HOPPER = DeviceProfile(torch.device("meta"), "planned", (9, 0), 132, 1 << 40)
MIXTURE = Recipe(128, 8, 1, weights="Q4_K", windows=(None, None), experts=8, context_length=8192)
CONFIG = EngineConfig(max_running=32, max_step_tokens=4096, context_length=8192)


def sizes_of(
    recipe: Recipe = MIXTURE, config: EngineConfig = CONFIG, device: DeviceProfile = HOPPER
) -> StepSizes | None:
    spec, checkpoint = random_model(recipe)
    settled = resolved(spec, checkpoint, config, "cuda")
    return aside_sizes(spec, settled, step_sizes(spec, settled, 64), device)


def test_a_chunk_has_one_row() -> None:
    sizes = sizes_of()
    assert sizes is not None
    assert (sizes.tokens, sizes.rows, sizes.selected, sizes.tiles) == (2048, 1, 1, 33)


@pytest.mark.parametrize(
    "recipe",
    [
        replace(MIXTURE, experts=0),
        replace(MIXTURE, parts=("shared",)),
        replace(MIXTURE, windows=(None, 300)),
        replace(MIXTURE, recurrent=("convolution",)),
    ],
    ids=("dense", "shared", "window", "state"),
)
def test_models_whose_prompts_are_read_in_steps(recipe: Recipe) -> None:
    assert sizes_of(recipe) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_invariant": True},
        {"prompt_dtype": "fp8"},
        {"graphs": False},
        {"max_running": 1},
        {"max_step_tokens": 1024},
        {"context_length": 4096},
    ],
    ids=str,
)
def test_configurations_whose_prompts_are_read_in_steps(changes: dict[str, object]) -> None:
    assert sizes_of(config=replace(CONFIG, **changes)) is None  # type: ignore[arg-type]


def test_other_cards_read_prompts_in_steps() -> None:
    assert sizes_of(device=replace(HOPPER, capability=(10, 0))) is None
    assert sizes_of(device=replace(HOPPER, without=frozenset({"matmuls"}))) is None

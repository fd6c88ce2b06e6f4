"""Wide heads on cards with little shared memory are refused by name, before a weight is read. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.kernel_sizes import check_heads  # noqa: E402
from realizar.backends.cuda.load import load_model  # noqa: E402
from realizar.backends.cuda.sleep.load_memory import LoadMemory  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import UnsupportedModelError  # noqa: E402
from resolving import resolved  # noqa: E402

CARD = DeviceProfile(torch.device("cuda", 0), "a small card", (8, 9), 4, 1 << 30, 99 << 10)
WIDE = Recipe(256, 2, 1, 64, 64, 48, windows=(8, None), full_head_size=512, weights="F32")


def test_a_load_refuses_heads_that_a_block_has_no_room_for() -> None:
    spec, checkpoint = random_model(WIDE)
    reason = "random: attention with heads of 512 needs 100 KiB of shared memory a block; a small card has 99"
    config = resolved(spec, checkpoint, EngineConfig(), "cuda")
    with pytest.raises(UnsupportedModelError, match=f"^{reason}$"):
        load_model(spec, checkpoint, config, CARD, lambda *_: None, LoadMemory())


def test_other_cards_and_heads_are_taken() -> None:
    spec, _ = random_model(WIDE)
    check_heads(spec, replace(CARD, shared_bytes=163 << 10))
    check_heads(random_model(replace(WIDE, full_head_size=0))[0], CARD)

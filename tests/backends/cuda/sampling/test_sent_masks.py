"""Masks on their way to the device: one copy of those that a step's choices have. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from realizar.backends.cuda.sampling.native_choices import NativeChoiceMaker  # noqa: E402

WORDS = 5


def test_each_choice_gets_its_mask() -> None:
    """Rows without a grammar have none, rows with drafts one for each place; before min_tokens one loses the ends."""
    room = torch.zeros((8, WORDS), dtype=torch.int32)
    maker: Any = SimpleNamespace(
        _pinned=lambda shape: torch.empty(shape, dtype=torch.int32),
        _buffers=SimpleNamespace(words=WORDS, masks=lambda count: room[:count]),
        _rows=SimpleNamespace(without_ends=lambda row, mask: mask & ~np.uint32(row)),
    )
    rng = np.random.default_rng(1)
    drafted, single = rng.integers(0, 1 << 32, (3, WORDS), np.uint32), rng.integers(0, 1 << 32, WORDS, np.uint32)
    step: Any = SimpleNamespace(masks={4: drafted, 9: single})
    numbers, places = np.array([2, 4, 4, 4, 9]), np.array([0, 0, 1, 2, 0])
    masks = np.full(5, -1)
    NativeChoiceMaker._send_masks(maker, step, numbers, places, np.array([0, 0, 1, 0, 0], np.bool_), masks)
    assert masks.tolist() == [-1, 0, 1, 2, 3]
    expected = np.stack([drafted[0], drafted[1] & ~np.uint32(4), drafted[2], single])
    assert np.array_equal(room[:4].numpy().view(np.uint32), expected)
    assert not room[4:].any()
    step.masks = {1: single}
    masks[:] = -1
    NativeChoiceMaker._send_masks(maker, step, numbers, places, np.zeros(5, np.bool_), masks)
    assert masks.tolist() == [-1] * 5

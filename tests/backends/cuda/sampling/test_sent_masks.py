"""Masks on their way to the device: one copy of those that a step's choices have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from realizar.backends.cuda.sampling.native_buffers import HELD, NO_MASK  # noqa: E402
from realizar.backends.cuda.sampling.native_choices import NativeChoiceMaker  # noqa: E402
from realizar.backends.cuda.sampling.shared_masks import SharedMasks  # noqa: E402
from realizar.backends.row_masks import RowMasks  # noqa: E402
from realizar.structured.workers.mask_memory import MaskMemory  # noqa: E402

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


@pytest.mark.parametrize("places", [(2, 0, 3), (0, 29, 1), (0, 29, 7), (29, 9, 29)], ids=str)
def test_masks_of_a_table_are_sent_by_their_places(places: tuple[int, ...]) -> None:
    """As one part of the table or two where these are short, else those lines alone, each once."""
    room = torch.zeros((8, WORDS), dtype=torch.int32)
    table = np.random.default_rng(1).integers(0, 1 << 32, (32, WORDS), np.uint32)
    given = RowMasks(np.array([9, 1, 4]), np.array(places), table, {})
    maker: Any = SimpleNamespace(
        _pinned=lambda shape: torch.empty(shape, dtype=torch.int32),
        _buffers=SimpleNamespace(words=WORDS, masks=lambda count: room[:count], most_masks=8),
        _rows=SimpleNamespace(kinds=np.zeros(12)),
        _space=SimpleNamespace(logits=torch.zeros(1)),
        _shared=SharedMasks(),
    )
    maker._send_table = lambda *args: NativeChoiceMaker._send_table(maker, *args)
    masks = np.full(4, -1)
    step: Any = SimpleNamespace(masks=given)
    none = np.zeros(4, np.int64)
    NativeChoiceMaker._send_masks(maker, step, np.array([2, 4, 9, 1]), none, none.astype(np.bool_), masks)
    assert masks[0] == -1
    assert np.array_equal(room[masks[1:]].numpy().view(np.uint32), table[[places[2], places[0], places[1]]])
    masks[:] = -1
    NativeChoiceMaker._send_masks(maker, step, np.array([2, 3, 5, 6]), none, none.astype(np.bool_), masks)
    assert masks.tolist() == [-1] * 4


def test_places_of_masks_for_a_graph() -> None:
    """Each choice's mask, or that its row is held; none are left for a later step without masks."""
    table, sent = np.zeros((32, WORDS), np.uint32), torch.full((4,), NO_MASK, dtype=torch.int32)

    def send(columns: Any, where: Any) -> None:
        where[: len(columns[0]), 0] = torch.from_numpy(columns[0])

    def send_table(given: RowMasks, numbers: Any, places: Any) -> None:
        places[:] = [given.places[given.numbers.tolist().index(row)] if row in given else NO_MASK for row in numbers]

    maker: Any = SimpleNamespace(
        _rows=SimpleNamespace(outputs=np.zeros(9, np.int64), min_tokens=np.zeros(9, np.int64)),
        _buffers=SimpleNamespace(mask_places=sent), _send=send, _send_table=send_table, _has_places=False,
    )  # fmt: skip

    def places(step: Any) -> list[int] | None:
        return sent.tolist() if NativeChoiceMaker._send_places(maker, step, np.array([2, 7, 5])) else None

    given = RowMasks(np.array([7]), np.array([3]), table, {})
    are_held = np.array([False, False, True])
    none = SimpleNamespace(masks={}, held=frozenset())
    assert places(none) == [NO_MASK] * 4
    masked = SimpleNamespace(masks=given, held=frozenset({5}), are_held=lambda _: are_held)
    assert places(masked) == [NO_MASK, 3, HELD, NO_MASK]
    assert places(none) == [NO_MASK] * 4
    maker._rows.min_tokens[7] = 1
    assert places(masked) is None
    assert places(SimpleNamespace(masks={7: table[0]}, held=frozenset())) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_reads_a_table_that_others_write() -> None:
    """Its pages are locked where they lie; those of another table in their place."""
    shared = SharedMasks()
    for seed in range(2):
        memory = MaskMemory(WORDS, 1000, 0)
        memory.masks[:] = np.random.default_rng(seed).integers(0, 1 << 32, (1000, WORDS), np.uint32)
        for _ in range(2):
            lines = shared.lines(memory.masks, lock=True)
            assert lines.is_pinned()
            copied = lines[10:900].to("cuda", non_blocking=True)
            assert np.array_equal(copied.cpu().numpy().view(np.uint32), memory.masks[10:900])
            memory.masks[:] ^= np.uint32(5)
        memory.close()
    shared.release()
    shared.release()

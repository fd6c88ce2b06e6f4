"""Masks on their way to the device: one copy of those that a step's sampled tokens have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from realizar.backends.cuda.sampling.native_buffers import DEFERRED, MOST_KEPT, NO_MASK, SHARED  # noqa: E402
from realizar.backends.cuda.sampling.native_step_sampler import NativeStepSampler  # noqa: E402
from realizar.backends.row_masks import RowMasks  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
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
    NativeStepSampler._send_masks(maker, step, numbers, places, np.array([0, 0, 1, 0, 0], np.bool_), masks)
    assert masks.tolist() == [-1, 0, 1, 2, 3]
    expected = np.stack([drafted[0], drafted[1] & ~np.uint32(4), drafted[2], single])
    assert np.array_equal(room[:4].numpy().view(np.uint32), expected)
    assert not room[4:].any()
    step.masks = {1: single}
    masks[:] = -1
    NativeStepSampler._send_masks(maker, step, numbers, places, np.zeros(5, np.bool_), masks)
    assert masks.tolist() == [-1] * 5


@pytest.mark.parametrize("places", [(2, 0, 3), (0, 29, 1), (29, 9, 29)], ids=str)
@pytest.mark.parametrize("address", [None, 4096])
def test_masks_of_a_table_are_read_where_they_lie_or_sent(address: int | None, places: tuple[int, ...]) -> None:
    """By their lines where the device reads the table, else those lines alone are sent, each once."""
    room, read = torch.zeros((8, WORDS), dtype=torch.int32), list[int]()
    table = np.random.default_rng(1).integers(0, 1 << 32, (32, WORDS), np.uint32)
    given = RowMasks(np.array([9, 1, 4]), np.array(places), table, {})
    maker: Any = SimpleNamespace(
        _pinned=lambda shape: torch.empty(shape, dtype=torch.int32),
        _buffers=SimpleNamespace(words=WORDS, masks=lambda count: room[:count], read_shared=read.append),
        _rows=SimpleNamespace(kinds=np.zeros(12)),
        _shared=SimpleNamespace(address=lambda of: address if of is table else None),
    )
    maker._index_masks = lambda *args: NativeStepSampler._index_masks(maker, *args)
    masks = np.full(4, -1)
    step: Any = SimpleNamespace(masks=given)
    none = np.zeros(4, np.int64)
    NativeStepSampler._send_masks(maker, step, np.array([2, 4, 9, 1]), none, none.astype(np.bool_), masks)
    assert masks[0] == -1
    lines = [places[2], places[0], places[1]]
    if address is None:
        assert np.array_equal(room[masks[1:]].numpy().view(np.uint32), table[lines])
        assert (masks < len(set(places))).all()
    else:
        assert (masks[1:] - SHARED).tolist() == lines
        assert not room.any()
    assert read == ([] if address is None else [address])
    masks[:] = -1
    NativeStepSampler._send_masks(maker, step, np.array([2, 3, 5, 6]), none, none.astype(np.bool_), masks)
    assert masks.tolist() == [-1] * 4


def test_masks_of_known_states_stay_on_the_device() -> None:
    """Each is sent once, and again when its version or the table is another one; beside them others are read."""
    rng, kept, read = np.random.default_rng(1), torch.zeros((MOST_KEPT, WORDS), dtype=torch.int32), list[int]()
    tables = rng.integers(0, 1 << 32, (2, 32, WORDS), np.uint32)
    sent: list[tuple[int, ...]] = []

    def pinned(shape: tuple[int, ...]) -> Any:
        sent.append(shape)
        return torch.empty(shape, dtype=torch.int32)

    maker: Any = SimpleNamespace(
        _pinned=pinned,
        _buffers=SimpleNamespace(words=WORDS, kept_masks=lambda: (100, kept), read_shared=read.append),
        _rows=SimpleNamespace(kinds=np.zeros(24)), _shared=SimpleNamespace(address=lambda of: 4096),
        _kept=np.zeros(MOST_KEPT, np.int64), _kept_of=None,
    )  # fmt: skip
    maker._keep_masks = lambda *args: NativeStepSampler._keep_masks(maker, *args)
    numbers, indices, versions = np.arange(2, 8), np.array([30, 20, 3, 20, 31, 20]), np.ones(12, np.int64)
    first, second = tables
    for table, changed, count in ((first, None, 3), (first, None, 0), (first, 11, 1), (second, None, 3)):
        if changed is not None:
            table[20 + changed], versions[changed] = rng.integers(0, 1 << 32, WORDS, np.uint32), 2
        masks = np.full(6, -1)
        NativeStepSampler._index_masks(maker, RowMasks(numbers, indices, table, {}, versions), numbers, masks)
        assert (masks - 100).tolist() == [10, 0, SHARED + 3 - 100, 0, 11, 0]
        assert np.array_equal(kept[[10, 0, 11]].numpy().view(np.uint32), table[[30, 20, 31]])
        assert sum(lines for lines, _ in sent) == count
        sent.clear()
    assert read == [4096] * 4


def test_indices_of_masks_for_a_graph() -> None:
    """Each sampled token's mask, or that its row is deferred; none are left for a later step without masks."""
    table, sent = np.zeros((32, WORDS), np.uint32), torch.full((4,), NO_MASK, dtype=torch.int32)

    def send(places: Any) -> None:
        sent[:] = NO_MASK
        sent[: len(places)] = torch.from_numpy(places)

    def index_masks(given: RowMasks, numbers: Any, places: Any) -> None:
        places[:] = [given.indices[given.numbers.tolist().index(row)] if row in given else NO_MASK for row in numbers]

    maker: Any = SimpleNamespace(
        _rows=SimpleNamespace(outputs=np.zeros(9, np.int64), min_tokens=np.zeros(9, np.int64), forbids_ends=True),
        _buffers=SimpleNamespace(mask_indices=sent, send_mask_indices=send), _index_masks=index_masks,
        _has_mask_indices=False,
    )  # fmt: skip

    def places(step: Any) -> list[int] | None:
        return sent.tolist() if NativeStepSampler._send_mask_indices(maker, step, np.array([2, 7, 5])) else None

    given = RowMasks(np.array([7]), np.array([3]), table, {})
    are_deferred = np.array([False, False, True])
    none = SimpleNamespace(masks={}, deferred=frozenset())
    assert places(none) == [NO_MASK] * 4
    masked = SimpleNamespace(masks=given, deferred=frozenset({5}), are_deferred=lambda _: are_deferred)
    assert places(masked) == [NO_MASK, 3, DEFERRED, NO_MASK]
    assert places(none) == [NO_MASK] * 4
    maker._rows.min_tokens[7] = 1
    assert places(masked) is None
    assert places(SimpleNamespace(masks={7: table[0]}, deferred=frozenset())) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_reads_a_table_that_others_write() -> None:
    """What it finds there is of the moment; then another table in its place, and none."""
    vocab, rows = 5000, 12
    steps = SampledSteps(rows, vocab, graphs=True)
    for row in range(rows):
        steps.open(row, SamplingParams(temperature=0.0, structured=StructuredOutput("regex", "a")), [1, 2, 3])
    rng, lengths = np.random.default_rng(2), [3] * rows
    for _ in range(2):
        memory = MaskMemory(-(-vocab // 32), 2 * rows, 0, num_lines=3)
        for _ in range(3):
            allowed, places = rng.integers(0, vocab, rows), rng.permutation(2 * rows + 3)[:rows]
            memory.masks[:] = 0
            memory.masks[places, allowed // 32] = np.uint32(1) << (allowed % 32).astype(np.uint32)
            memory.versions[:] += 1
            masks = RowMasks(np.arange(rows), places, memory.masks, {}, memory.versions)
            outputs = steps.decode(list(range(rows)), lengths, rng.standard_normal((rows, vocab), np.float32), masks)
            assert [output.token_ids for output in outputs] == [(token_id,) for token_id in allowed.tolist()]
            lengths = [length + 1 for length in lengths]
        memory.close()
    steps.maker.release()
    steps.maker.release()

"""The records, addresses, memory and flags that sampling kernels read are those that Python writes. Without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import Arrays  # noqa: E402
from realizar.backends.cuda.native.sampling.source import sampling_sources  # noqa: E402
from realizar.backends.cuda.sampling import native_rows  # noqa: E402
from realizar.backends.cuda.sampling.native_buffers import NativeBuffers, fixed_bytes, reserved_bytes  # noqa: E402
from realizar.backends.cuda.sampling.native_graphs import VARIANTS, SamplerGraphs  # noqa: E402
from realizar.backends.cuda.sampling.native_rows import ROW, NativeRows, kinds_of  # noqa: E402
from realizar.backends.cuda.workspace import LOGIT_BLOCK  # noqa: E402
from realizar.errors import InvalidRequestError  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from step_inputs import opened_row  # noqa: E402

SOURCE = sampling_sources()[0].text
(SAMPLERS,) = re.findall(r"#define SAMPLERS (.*)", SOURCE)
CPU = torch.device("cpu")
SIZES = {"int": 4, "float": 4, "double": 8, "u64": 8}


def fields_of(name: str) -> list[tuple[str, int]]:
    """Name and size of each member of a struct."""
    (body,) = re.findall(rf"struct {name} \{{(.*?)\}};", SOURCE, re.DOTALL)
    found = []
    for line in body.replace("SAMPLERS", SAMPLERS).split(";"):
        if declared := re.match(r"\s*(?:const )?(\w+)([ *]+)(.*)", line, re.DOTALL):
            kind, star, names = declared.groups()
            found += [(each.strip(), 8 if "*" in star else SIZES[kind]) for each in names.split(",")]
    return found


def test_a_rows_record_is_the_kernels() -> None:
    assert fields_of("Row") == [(name, ROW[name].itemsize) for name in ROW.names or () if name != "padding"]
    assert ROW.itemsize % 8 == 0


@pytest.mark.parametrize("flag", ["ADJUST", "DRAW", "CUT", "HISTOGRAM", "DEVIATION", "DRY"])
def test_flags_are_the_kernels(flag: str) -> None:
    assert re.search(rf"#define {flag} {getattr(native_rows, flag)}\b", SOURCE)


def space_of(rows: int, selected: int, vocab: int) -> Any:
    blocks = -(-vocab // LOGIT_BLOCK)
    arrays = Arrays(rows, selected, CPU)
    ids = torch.zeros((selected, blocks), dtype=torch.int32)
    sampled, last = torch.zeros(selected, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    logits, tops = torch.zeros((selected, vocab)), torch.zeros((selected, blocks))
    return SimpleNamespace(arrays=arrays, logits=logits, block_tops=tops, block_ids=ids, sampled=sampled, last=last)


def test_buffers_are_as_large_as_planned() -> None:
    rows, selected, vocab = 4, 12, 50_001
    space = space_of(rows, selected, vocab)
    of_rows = NativeRows(rows, vocab, 64, CPU)
    buffers = NativeBuffers(space, of_rows)

    def size() -> int:
        return sum(each.nbytes for each in vars(buffers).values() if isinstance(each, torch.Tensor))

    first = size()
    assert 0.9 * fixed_bytes(selected, vocab) <= first <= fixed_bytes(selected, vocab)
    buffers.need_adjusted()
    buffers.masks(3)
    counts = 4 * rows * vocab
    assert size() - first <= reserved_bytes(selected, rows, vocab, 64) - counts
    fields = fields_of("Tables")
    assert buffers.tables.numel() == sum(size for _, size in fields)
    addresses = buffers.tables.numpy()[: 8 * 21].view(np.uint64)
    assert addresses[[0, 3, 6]].tolist() == [
        tensor.data_ptr() for tensor in (space.logits, buffers._adjusted, buffers._masks)
    ]


def test_memory_for_many_rows_of_long_contexts_is_bounded() -> None:
    """Penalties, adjusted logits and masks of 256 rows, and DRY's tables of some of them."""
    assert reserved_bytes(256, 256, 152_064, 131_072) <= 0.6e9
    assert reserved_bytes(32, 2, 512, 256) <= 1 << 20


def test_a_row_that_opens_and_closes() -> None:
    rows = NativeRows(2, 100, 64, CPU)
    seen = []
    sampling = SamplingParams(
        temperature=0.0, presence_penalty=1.0, dry_multiplier=0.5, min_tokens=4, stop_token_ids=(3, 700), logprobs=2,
        logit_bias={5: 1.0}, top_k=1 << 40, seed=-1,
    )  # fmt: skip
    history = [1, 2, 1, 2, 9]
    rows.open(opened_row(1, sampling, history, 4), lambda *given: seen.append(given))
    record = rows.table[1].numpy().view(ROW)[0]
    assert (record["seed"], record["top_k"], record["num_ends"], record["num_biases"]) == (
        (1 << 64) - 1,
        (1 << 31) - 1,
        1,
        1,
    )
    assert record["dry_start"] + rows.outputs[1] == len(history)
    assert seen[0][1].tolist() == history
    assert seen[0][2] == 4
    assert (rows.outputs[1], rows.min_tokens[1], rows.logprobs[1]) == (1, 4, 2)
    assert rows.kinds[1] == native_rows.ADJUST | native_rows.DRY
    rows.close(1)
    assert (rows.kinds[1], rows.min_tokens[1], rows.logprobs[1], rows._held) == (0, 0, -1, {})
    with pytest.raises(InvalidRequestError, match="300"):
        rows.open(opened_row(0, SamplingParams(logit_bias={300: 1.0}), [1]), lambda *_: None)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, 0),
        ({"temperature": 0.0, "top_k": 0, "mirostat": 2}, 0),
        ({}, native_rows.DRAW),
        ({"min_p": 0.1}, native_rows.DRAW | native_rows.CUT),
        ({"top_p": 0.9}, native_rows.DRAW | native_rows.CUT | native_rows.HISTOGRAM),
        ({"top_n_sigma": 1.0}, native_rows.DRAW | native_rows.CUT | native_rows.DEVIATION),
        ({"mirostat": 2, "top_p": 0.9}, native_rows.DRAW | native_rows.CUT | native_rows.MIROSTAT),
        ({"logit_bias": {1: 1.0}}, native_rows.DRAW | native_rows.ADJUST),
    ],
)
def test_kinds_of_rows(options: dict[str, Any], flags: int) -> None:
    assert kinds_of(SamplingParams(**options)) == flags


def test_flags_of_a_steps_rows() -> None:
    """Those of all rows together; while `min_tokens` forbids a row to end, its ids are taken from the logits."""
    rows = NativeRows(3, 100, 64, CPU)
    late = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    for row, sampling in enumerate((SamplingParams(top_p=0.5), late, SamplingParams(temperature=0.0))):
        rows.open(opened_row(row, sampling, [1, 2, 5, 6], 3), lambda *_: None)
    found = rows.flags_of(np.array([2, 0]), np.array([4, 4]))
    assert found == native_rows.DRAW | native_rows.CUT | native_rows.HISTOGRAM
    assert rows.flags_of(np.array([1]), np.array([4])) == native_rows.ADJUST
    assert rows.flags_of(np.array([1, 2]), np.array([5, 4])) == 0


def test_sets_of_kernels_hold_every_kind() -> None:
    """Each set of flags has a graph with all the kernels that it needs, of rows padded up."""
    graphs = SamplerGraphs([1, 4])
    graphs._graphs = {(count, flags): (count, flags) for count in (1, 4) for flags in VARIANTS}  # type: ignore[misc]
    launched = native_rows.ADJUST | native_rows.DRAW | native_rows.CUT | native_rows.DRY
    for flags in range(1, 128):
        count, variant = graphs.find(3, flags)  # type: ignore[misc]
        assert count == 4
        assert flags & launched & ~variant == 0
    assert graphs.find(5, 1) is None
    graphs.free()
    assert graphs.find(1, 1) is None


def test_ends_leave_a_mask_unless_nothing_else_is_allowed() -> None:
    rows = NativeRows(1, 100, 64, CPU)
    rows.open(opened_row(0, SamplingParams(min_tokens=2, stop_token_ids=(3, 40)), [1]), lambda *_: None)
    both = np.array([1 << 3 | 1 << 5, 1 << 8, 0, 0], np.uint32)
    assert rows.without_ends(0, both).tolist() == [1 << 5, 0, 0, 0]
    ends = np.array([0, 1 << 8, 0, 0], np.uint32)
    assert rows.without_ends(0, ends).tolist() == ends.tolist()


def test_the_end_of_an_output_with_drafts() -> None:
    rows = NativeRows(1, 100, 64, CPU)
    rows.open(opened_row(0, SamplingParams(min_tokens=2, stop_token_ids=(3,)), [1]), lambda *_: None)
    assert kept(rows, [4, 3]) == (2, False)
    assert kept(rows, [5, 3, 6]) == (2, True)
    grammar = SamplingParams(min_tokens=9, stop_token_ids=(3,), structured=StructuredOutput("regex", "a"))
    rows.open(opened_row(0, grammar, [1]), lambda *_: None)
    assert kept(rows, [3, -2]) == (1, True)


def kept(rows: NativeRows, sampled: list[int]) -> tuple[int, bool]:
    """How many sampled tokens row 0 keeps, and whether they end its output."""
    counts, ended = rows.take_in(np.array([0]), np.array([sampled], np.int32))
    return int(counts[0]), bool(ended[0])


def test_choices_are_compared_with_the_stop_ids_of_their_own_row() -> None:
    """Ids that end another row, ids beyond the vocabulary, rows that are closed or opened again, codes of errors."""
    rows = NativeRows(4, 100, 64, CPU)
    for row, stops in enumerate(((3, 3, 2**40), (5, -1), (), (3,))):
        rows.open(opened_row(row, SamplingParams(stop_token_ids=stops), [1]), lambda *_: None)
    rows.close(3)
    rows.open(opened_row(3, SamplingParams(stop_token_ids=(6,)), [1]), lambda *_: None)
    sampled = np.array([[5, 3, 6], [3, 6, -2], [3, 5, -1], [3, 5, 6]], np.int32)
    counts, ended = rows.take_in(np.arange(4), sampled)
    assert counts.tolist() == [2, 2, 2, 3]
    assert ended.tolist() == [True, False, False, True]
    assert rows.outputs.tolist() == [2, 2, 2, 3]


def test_adjusted_logits_that_do_not_fit_leave_no_address_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ends between the buffers costs that step; later ones find all of them."""
    space = space_of(4, 12, 5000)
    buffers = NativeBuffers(space, NativeRows(4, 5000, 64, CPU))
    zeros, calls = torch.zeros, []

    def zeros_once_short(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", zeros_once_short)
    with pytest.raises(torch.OutOfMemoryError):
        buffers.need_adjusted()
    buffers.need_adjusted()
    addresses = buffers.tables.numpy()[: 8 * 6].view(np.uint64)
    assert all(addresses[3:6])

"""Paged attention against float64: chunks and single tokens, split and not, everything unread poisoned with NaNs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu.kernels.kernel_calls import call, poisoned
from backends.cpu.kernels.kv_blocks import KVBlocks, layout_of
from backends.cpu.kernels.record_checks import WIDTH, check_records, poisoned_records, rows_of
from cpu_runs import skip_unless_supported
from realizar.backends.cpu.instruction_set import index_of, select
from realizar.backends.cpu.kernels.attention import combine, make_attend
from realizar.backends.cpu.kernels.attention_record import (
    ATTEND,
    ROW_FIELDS,
    SEGMENT,
    STEP_ROWS,
    STEP_SPLIT,
    STEP_TOKENS,
)
from realizar.backends.cpu.kernels.attention_segment import scratch_bytes
from realizar.backends.cpu.kv.layout import KV_DTYPES
from wider import wider

BLOCK = 32
THREADS = 3
Floats = NDArray[np.float64]
# (tokens computed before, tokens in this step): single tokens on both sides of a segment, chunks across one, no token.
ROWS = ((0, 5), (255, 1), (256, 1), (0, 0), (250, 13), (530, 1), (700, 3))


@dataclass(frozen=True)
class Case:
    """One attention. `soft_cap` and `window` 0 for none. The last `image` tokens of each row see each other."""

    head_size: int = 64
    group: int = 2
    kv_heads: int = 2
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    gate: bool = False
    whole: bool = False
    image: int = 0
    dtype: str = "f16"
    rows: tuple[tuple[int, int], ...] = ROWS


class Attention:
    """A case's inputs: queries, and blocks in a random order that hold exactly what the rows have computed."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(case.head_size + 10 * case.group)
        self.case, self.rng = case, rng
        self.heads = case.group * case.kv_heads
        self.tokens = sum(count for _, count in case.rows)
        self.query = (2 * rng.standard_normal((self.tokens, self.heads, case.head_size))).astype(np.float32)
        self.sinks = rng.standard_normal(self.heads).astype(np.float32) + 1
        width = self.heads * case.head_size
        self.gate = np.zeros((self.tokens, -(-width // 32) * 32), np.float32)
        self.gate[:, :width] = 3 * np.random.default_rng(7).standard_normal((self.tokens, width))
        self.layout = layout_of(case.kv_heads, case.head_size, case.dtype)
        lengths = [computed + count for computed, count in case.rows]
        needed = [-(-length // BLOCK) for length in lengths]
        self.blocks = KVBlocks(self.layout, sum(needed) + 2)
        order = rng.permutation(self.blocks.count).astype(np.int32)
        self.table = np.full((len(case.rows), max(needed)), order[-1], np.int32)  # a block never written
        self.keys: list[Floats] = []
        self.values: list[Floats] = []
        for row, length in enumerate(lengths):
            own, order = order[: needed[row]], order[needed[row] :]
            self.table[row, : needed[row]] = own
            first = max(0, case.rows[row][0] - case.window + 1) // BLOCK * BLOCK if case.window else 0
            self._fill(own, first, length)

    def _fill(self, own: NDArray[np.int32], first: int, length: int) -> None:
        shape = (length, self.case.kv_heads, self.case.head_size)
        keys, values = self.rng.standard_normal(shape), self.rng.standard_normal(shape) + 0.3
        for position in range(first, length):
            slot = int(own[position // BLOCK]) * BLOCK + position % BLOCK
            self.blocks.write(slot, keys[position], values[position])
            keys[position], values[position] = self.blocks.read(slot)
        self.keys.append(keys)
        self.values.append(values)

    def last_seen(self, position: int, end: int) -> int:
        return end - 1 if self.case.whole or position >= end - self.case.image else position

    def expected(self) -> Floats:
        """[tokens, heads, head size]."""
        case, out, token = self.case, [], 0
        for (computed, count), keys, values in zip(case.rows, self.keys, self.values, strict=True):
            for position in range(computed, computed + count):
                low = max(0, position - case.window + 1) if case.window else 0
                end = self.last_seen(position, computed + count) + 1
                k, v = (np.repeat(part[low:end], case.group, axis=1) for part in (keys, values))
                scores = np.einsum("hd,khd->hk", self.query[token], k) / math.sqrt(case.head_size)
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                total = weights.sum(-1)
                if case.sinks:
                    total = total + np.exp(self.sinks - scores.max(-1))
                out.append(np.einsum("hk,khd->hd", weights / total[:, None], v))
                if case.gate:
                    gate = self.gate[token, : self.heads * case.head_size].astype(np.float64)
                    out[-1] /= 1 + np.exp(-gate.reshape(self.heads, -1))
                token += 1
        return np.array(out)

    def run(self, instruction_set: str, split: bool) -> NDArray[np.float32]:
        """float32 [tokens, heads, head size] by the kernels; its records are checked on the way."""
        case, width = self.case, self.heads * self.case.head_size
        padded = -(-width // 32) * 32
        segments = -(-max(computed + count for computed, count in case.rows) // SEGMENT) if split else 0
        step = np.zeros(8, np.int64)
        step[STEP_TOKENS], step[STEP_ROWS], step[STEP_SPLIT] = self.tokens, len(case.rows), segments
        rows, first = np.zeros((len(case.rows), ROW_FIELDS), np.int64), 0
        for row, (computed, count) in zip(rows, case.rows, strict=True):
            row[:] = first, count, computed
            first += count
        ends = [(range(computed, computed + count), computed + count) for computed, count in case.rows]
        seen = [self.last_seen(position, end) for positions, end in ends for position in positions]
        out = poisoned(self.tokens, padded)
        out[:, width:] = 0
        records = poisoned_records(self.tokens, padded // 32)
        scratch = poisoned(THREADS, -(-scratch_bytes(self.layout.padded_head_size) // 64) * 16)
        partial = poisoned(self.tokens * self.heads * max(segments, 1) * (self.layout.padded_head_size + 2))
        fields = {
            "step": step, "query": self.query, "query_stride": self.query.strides[0], "num_heads": self.heads,
            "num_kv_heads": case.kv_heads, "head_size": case.head_size, "scale": 1 / math.sqrt(case.head_size),
            "window": case.window, "soft_cap": case.soft_cap, "sinks": self.sinks if case.sinks else 0,
            "cache": self.blocks.memory, **self.layout.fields(),
            "rows": rows, "block_table": self.table, "table_stride": self.table.strides[0], "scratch": scratch,
            "scratch_bytes": scratch.strides[0], "out": out, "out_stride": out.strides[0], "partial": partial,
            "records": records, "records_groups": padded // 32, "records_width": WIDTH,
            "gate": self.gate if case.gate else 0, "gate_stride": self.gate.strides[0], "whole": case.whole,
            "seen": np.array(seen, np.int32) if case.image else 0,
        }  # fmt: skip
        call(make_attend(index_of(instruction_set), KV_DTYPES.index(case.dtype)).address, ATTEND, THREADS, **fields)
        call(combine.address, ATTEND, THREADS, **fields)
        there = np.isfinite(out).all(axis=1)
        check_records(rows_of(records, self.tokens)[there], out[there])
        return np.ascontiguousarray(out[:, :width]).reshape(self.tokens, self.heads, case.head_size)


def check(case: Case, instruction_set: str | None = None) -> None:
    attention = Attention(case)
    name = instruction_set or select().name
    whole, split = attention.run(name, False), attention.run(name, True)
    assert np.max(np.abs(whole - attention.expected())) <= 6e-6
    np.testing.assert_array_equal(whole.view(np.uint32), split.view(np.uint32))


@pytest.mark.parametrize("group", range(1, 9))
def test_grouped_queries(group: int) -> None:
    check(Case(group=group))


@pytest.mark.parametrize("head_size", [24, 80, 96, 128, 256])
def test_head_sizes(head_size: int) -> None:
    check(Case(head_size, group=3))


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_element_types(head_size: int, dtype: str) -> None:
    check(Case(head_size, dtype=dtype))


@pytest.mark.parametrize("window", [1, 2, 31, 33, 256, 300])
def test_windows(window: int) -> None:
    check(Case(window=window, group=4))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_value_that_is_no_number_is_seen_by_its_row_alone(dtype: str) -> None:
    made = Attention(Case(dtype=dtype, rows=((300, 1), (40, 3), (0, 5))))
    value = np.zeros((2, 64))
    value[0, 7] = np.nan
    made.blocks.write(int(made.table[1, 0]) * BLOCK + 5, np.zeros((2, 64)), value)
    found = made.run(select().name, split=False)
    assert np.isnan(found[1:4, :2]).any(axis=2).all()
    assert np.isfinite(found[1:4, 2:]).all()
    assert np.isfinite(found[[0, 4, 5, 6, 7, 8]]).all()


@pytest.mark.parametrize("window", [0, 33, 300])
@pytest.mark.parametrize("dtype", ["f16", "int8", "fp8"])
def test_prompts_of_many_tiles(dtype: str, window: int) -> None:
    """More tiles than a thread takes at once, over several segments, from nothing and after other tokens."""
    check(Case(window=window, group=4, dtype=dtype, rows=((0, 590), (300, 70), (0, 1))))


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_soft_caps_and_sinks(soft_cap: float, sinks: bool, window: int) -> None:
    check(Case(group=5, soft_cap=soft_cap, sinks=sinks, window=window))


@pytest.mark.parametrize("head_size", [24, 256])
def test_output_gates(head_size: int) -> None:
    check(Case(head_size, group=3, gate=True, dtype="f32"))


@pytest.mark.parametrize(("group", "dtype"), [(1, "f32"), (3, "f16")])
def test_rows_whose_tokens_see_each_other(group: int, dtype: str) -> None:
    check(Case(80, group, whole=True, dtype=dtype, rows=((0, 590), (0, 1), (0, 300), (30, 40))))


@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize(("group", "dtype"), [(1, "f32"), (3, "f16")])
def test_ends_of_rows_that_see_each_other(group: int, dtype: str, window: int) -> None:
    """Of images: one over several segments, one of a step that holds no more, and one of a single token."""
    check(Case(80, group, image=280, window=window, dtype=dtype, rows=((0, 590), (0, 1), (250, 300), (30, 40))))


OTHERS = ("avx_vnni", "avx2", "portable")
MIXED = Case(
    80, group=3, window=270, soft_cap=2.0, sinks=True, dtype="f32"
)  # shares a compiled kernel with other tests


@pytest.mark.parametrize("instruction_set", wider(OTHERS, "portable"))
def test_other_instruction_sets(instruction_set: str) -> None:
    skip_unless_supported(instruction_set)
    check(MIXED, instruction_set)


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", OTHERS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_size", [24, 64, 80, 96, 128, 256])
def test_every_instruction_set_element_type_and_head_size(head_size: int, dtype: str, instruction_set: str) -> None:
    skip_unless_supported(instruction_set)
    for group in (1, 3, 8):
        check(Case(head_size, group, dtype=dtype), instruction_set)
        check(Case(head_size, group, window=37, soft_cap=2.0, sinks=True, dtype=dtype), instruction_set)

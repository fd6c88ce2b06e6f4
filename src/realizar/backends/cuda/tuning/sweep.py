"""The matmuls of a model, and a sweep over their tiles and splits, from which `realizar tune` writes a table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from realizar.backends.cuda.layouts.fragments import FragmentFormat, fragment_format
from realizar.backends.cuda.matmul.tuning_table import FEW_TOKENS, DeviceTuning, ExpertLine, Line
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles
from realizar.backends.program import build_program
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import KernelError
from realizar.models.spec import ModelSpec
from realizar.quantization.layout import WeightLayout

_LOG = logging.getLogger(__name__)

_Line = TypeVar("_Line", Line, ExpertLine)
_LineOut = TypeVar("_LineOut", covariant=True)
_LineIn = TypeVar("_LineIn", contravariant=True)
TOKEN_COUNTS = (1, 2, 8, 16, 32, 64, 96, 128, 192, 256, 512, 2048)
"""Numbers of tokens that tables have lines for."""
_HEAD_TOKENS = 256  # logits are wanted of no more tokens at once


@dataclass(frozen=True, slots=True)
class Shape:
    """A merged matmul in steps of up to `most_tokens`; `layout` is that of most of its weights."""

    out_features: int
    cols: int
    layout: WeightLayout
    most_tokens: int = TOKEN_COUNTS[-1]

    def candidates(self, tokens: int, tuning: DeviceTuning) -> Iterator[Line]:
        """Every way in which a step of `tokens` may run here, as lines without a time."""
        if tokens > self.most_tokens:
            return
        weight_format = fragment_format(self.layout)
        chunks = weight_format.chunks(self.cols)
        for tiles in candidates(tokens, weight_format, tuning):
            for splits in split_counts(tiles, tokens, self.out_features, chunks, tuning):
                yield Line(tokens, self.out_features, self.cols, tiles, splits, 0.0)


class Work(Protocol[_LineOut]):
    """Matmuls that are tuned together."""

    def candidates(self, tokens: int, tuning: DeviceTuning) -> Iterable[_LineOut]:
        """Every way in which a step of `tokens` may run here, as lines without a time."""


class Meter(Protocol[_LineIn]):
    def take(self, work: Any) -> None:
        """Make matrices, for the following calls."""

    def prepare(self, candidates: Sequence[_LineIn]) -> None:
        """Compile the kernels that will be timed. Raises KernelError: one does not compile, or does not fit."""

    def ms(self, candidate: _LineIn) -> float:
        """Milliseconds of one launch. Raises KernelError: it does not run here."""


def model_shapes(spec: ModelSpec, checkpoint: Checkpoint) -> list[Shape]:
    """The quantised matmuls of a model, merged as the backend merges them, each shape once."""
    program, found = build_program(spec), dict[tuple[int, int], Shape]()
    tensors = WeightTensors(spec, checkpoint)
    for part, most in ((program.block_matmuls(), TOKEN_COUNTS[-1]), (program.tail.matmuls(), _HEAD_TOKENS)):
        for group in part:
            out_features: Counter[WeightLayout] = Counter()
            for linear in group:
                out_features[tensors.layout(linear.weight)] += linear.out_features
            quantized = {layout: count for layout, count in out_features.items() if layout.has_integers}
            if quantized:
                total, cols = sum(quantized.values()), group[0].in_features
                most_common = max(quantized, key=quantized.__getitem__)
                found.setdefault((total, cols), Shape(total, cols, most_common, most))
    return list(found.values())


def sweep(
    tuning: DeviceTuning, works: Iterable[Work[_Line]], token_counts: Sequence[int], meter: Meter[_Line],
    measured: Callable[[_Line], None] | None = None,
) -> list[_Line]:  # fmt: skip
    """Time every candidate for these matmuls and numbers of tokens, on the meter's device; `measured` gets each line.

    Returns a line per candidate that runs, for `tuning_table.updated_lines`; raises KernelError where none does.
    """
    lines: list[_Line] = []
    failed: KernelError | None = None
    for work in works:
        meter.take(work)
        for tokens in token_counts:
            tried = list(work.candidates(tokens, tuning))
            try:
                meter.prepare(tried)
            except KernelError as error:
                _LOG.info("%s", error)  # the one that is meant has no line: it says so again when it is timed
            for candidate in tried:
                try:
                    line = replace(candidate, ms=meter.ms(candidate))
                except KernelError as error:
                    failed = error
                    _LOG.info("%s", error)
                    continue
                lines.append(line)
                if measured is not None:
                    measured(line)
    if failed is not None and not lines:
        raise failed
    return lines


_REGISTERS, _MOST_REGISTERS = 65_536, 255  # of a multiprocessor, of a thread
_STATIC_BYTES = 4096  # shared memory that kernels take beside the ring, rounded up
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 12)
_WAVES = 2.2  # rounds of blocks beyond which splitting only writes more

# tiles, parts, unroll, blocks
_ONE_TOKEN = (
    (8, 1, 2, 3), (4, 2, 2, 3), (2, 4, 2, 3), (8, 1, 1, 4), (4, 2, 1, 4), (4, 1, 2, 6), (8, 1, 4, 2), (4, 2, 4, 2),
    (8, 1, 3, 2), (4, 4, 2, 1), (1, 5, 2, 4), (1, 8, 2, 3), (1, 12, 2, 2), (1, 16, 2, 1), (4, 4, 1, 2),
)  # fmt: skip
_FEW_TOKENS = (
    (8, 1, 1, 3), (4, 2, 1, 3), (8, 1, 2, 2), (4, 2, 2, 2), (8, 1, 1, 2), (4, 1, 2, 4), (4, 4, 1, 1), (2, 4, 1, 3),
    (1, 8, 2, 2), (1, 5, 2, 3), (1, 16, 1, 1),
)  # fmt: skip
# strips, groups, stages, step, blocks
_SMALL = (
    (1, 1, 4, 1, 3), (1, 1, 6, 1, 2), (1, 1, 8, 1, 2), (1, 1, 4, 2, 2), (1, 1, 3, 4, 2), (1, 2, 4, 1, 2),
    (1, 2, 3, 2, 2), (2, 1, 4, 1, 2), (2, 1, 6, 1, 2), (2, 1, 3, 2, 2), (2, 1, 6, 2, 1), (2, 2, 4, 1, 2),
    (2, 2, 8, 1, 1), (2, 2, 4, 2, 1), (1, 4, 4, 1, 1), (1, 2, 6, 2, 1), (1, 4, 4, 2, 1), (1, 2, 4, 2, 1),
)  # fmt: skip
_LARGE = (
    (1, 1, 4, 1, 1), (1, 2, 4, 1, 1), (1, 2, 5, 1, 1), (2, 2, 4, 1, 1), (2, 2, 5, 1, 1), (2, 2, 6, 1, 1),
    (1, 2, 3, 2, 1), (1, 2, 2, 2, 1), (1, 1, 3, 2, 1), (2, 2, 3, 2, 1), (2, 2, 2, 2, 1), (1, 2, 4, 1, 2),
    (1, 1, 4, 1, 2), (1, 1, 2, 2, 2), (2, 1, 4, 1, 1), (2, 1, 3, 2, 1),
)  # fmt: skip
# strips, stages, blocks
_MMA_SYNC = ((1, 4, 2), (1, 6, 1), (2, 4, 1), (2, 3, 2), (2, 6, 1), (4, 3, 1), (1, 3, 3))


def candidates(tokens: int, weight_format: FragmentFormat, device: DeviceTuning) -> Iterator[Tiles]:
    """Tiles that fit the device's registers and shared memory: the mat-vec up to `int8_tokens`, else tensor cores."""
    if tokens <= device.int8_tokens:
        yield from (MatvecTiles(tokens, *shape) for shape in (_ONE_TOKEN if tokens == 1 else _FEW_TOKENS))
        return
    block = device.block_tokens(tokens)
    tiles: Tiles
    if not device.wgmma:
        for strips, stages, blocks in _MMA_SYNC:
            tiles = MmaSyncTiles(block, strips, stages, blocks)
            if (tiles.shared_bytes(weight_format) + _STATIC_BYTES) * blocks <= device.shared_bytes:
                yield tiles
        return
    for shape in _SMALL if block <= FEW_TOKENS else _LARGE:
        tiles = WgmmaTiles(block, *shape)
        available = tiles.registers or min(_MOST_REGISTERS, _REGISTERS // (tiles.threads * tiles.blocks))
        needed = tiles.strips * (block // 2 + 32) + 48  # accumulators, two operands, the rest
        if (
            tiles.shared_bytes(weight_format) * tiles.blocks + _STATIC_BYTES <= device.shared_bytes
            and needed <= available
        ):
            yield tiles


def split_counts(tiles: Tiles, tokens: int, out_features: int, chunks: int, device: DeviceTuning) -> list[int]:
    """Splits that leave about two rounds of blocks at most, and each warp three chunks at least."""
    matvec, processors = isinstance(tiles, MatvecTiles), device.processors
    if matvec and device.keeps_columns(out_features):
        return [1]
    x, _, z = tiles.grid(out_features, 1, 1 if matvec else -(-tokens // tiles.tokens))
    parts = tiles.parts if isinstance(tiles, MatvecTiles) else 1
    limit = processors * tiles.blocks * _WAVES
    return [s for s in _SPLITS if s == 1 or (x * z * s <= limit and chunks // (s * parts) >= 3)]

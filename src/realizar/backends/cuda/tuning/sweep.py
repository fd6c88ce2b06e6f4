"""The matmuls of a model, and a sweep over their tiles and splits, from which `realizar tune` writes a table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning, Line
from realizar.backends.cuda.native.sources import Tiles
from realizar.backends.cuda.tuning.candidates import candidates, split_counts
from realizar.backends.program import build_program
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import KernelError
from realizar.models.spec import ModelSpec
from realizar.quantization import WeightLayout

_LOG = logging.getLogger(__name__)

TOKEN_COUNTS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048)
"""Numbers of tokens that tables have lines for."""
_HEAD_TOKENS = 256  # logits are wanted of no more tokens at once


@dataclass(frozen=True, slots=True)
class Shape:
    """A merged matmul.

    Attributes:
        out_features, cols: of the weights. layout: of most of them.
        most_tokens: of a step that runs it.
    """

    out_features: int
    cols: int
    layout: WeightLayout
    most_tokens: int = TOKEN_COUNTS[-1]


class Meter(Protocol):
    """Times matmuls on a device."""

    def take(self, shape: Shape) -> FragmentFormat:
        """Make matrices of a shape, for the following calls."""

    def prepare(self, tokens: int, tiles: Sequence[Tiles]) -> None:
        """Compile the kernels that will be timed."""

    def ms(self, tokens: int, tiles: Tiles, splits: int) -> float:
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
            quantized = {layout: count for layout, count in out_features.items() if not layout.is_float}
            if quantized:
                total, cols = sum(quantized.values()), group[0].in_features
                most_common = max(quantized, key=quantized.__getitem__)
                found.setdefault((total, cols), Shape(total, cols, most_common, most))
    return list(found.values())


def sweep(
    tuning: DeviceTuning, shapes: Iterable[Shape], token_counts: Sequence[int], meter: Meter,
    measured: Callable[[Line], None] | None = None,
) -> list[Line]:  # fmt: skip
    """Time every candidate for these shapes and numbers of tokens.

    Args:
        tuning: of the device that the meter times on.
        measured: called with each line.

    Returns:
        A line per candidate that runs; `tuning_table.best_lines` picks from them.
    """
    lines: list[Line] = []
    for shape in shapes:
        weight_format = meter.take(shape)
        for tokens in token_counts:
            if tokens > shape.most_tokens:
                continue
            tried = list(candidates(tokens, weight_format, tuning))
            meter.prepare(tokens, tried)
            for tiles in tried:
                for line in _of_tiles(tuning, shape, weight_format, tokens, tiles, meter):
                    lines.append(line)
                    if measured is not None:
                        measured(line)
    return lines


def _of_tiles(
    tuning: DeviceTuning, shape: Shape, weight_format: FragmentFormat, tokens: int, tiles: Tiles, meter: Meter
) -> Iterable[Line]:
    """A line for each number of splits."""
    for splits in split_counts(tiles, tokens, shape.out_features, weight_format.chunks(shape.cols), tuning):
        try:
            ms = meter.ms(tokens, tiles, splits)
        except KernelError as error:
            _LOG.info("%s", error)
            return
        yield Line(tokens, shape.out_features, shape.cols, tiles, splits, ms)

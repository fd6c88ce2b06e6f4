"""Products that share an input, merged into one output, whatever their matrices are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from realizar.backends.cuda.activations import ActivationBuffer, Form
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernels.weights import multiply
from realizar.backends.cuda.plain_matrix import PlainMatrix
from realizar.backends.cuda.weights import Matrix, Weights
from realizar.backends.program import Operation, Project
from realizar.models.spec import Linear, TensorName

_FLOAT_FORMS = {torch.float32: Form("f32"), torch.float16: Form("f16"), torch.bfloat16: Form("bf16")}
_ROWS, _COLUMNS = 64, 64  # a tile of the plain product
_MAX_SPLITS = 8

Buffers = Callable[[Form], ActivationBuffer]


@dataclass(frozen=True, slots=True)
class Segment:
    """A matrix and its first column in the merged output."""

    matrix: Matrix
    column: int


class MergedLinear:
    """Matrices side by side.

    Args:
        matrices: in the order of their columns.
        bias: float32 over all columns, or None; the kernel that sums the splits adds it.
    """

    def __init__(self, matrices: list[Matrix], bias: torch.Tensor | None, device: DeviceProfile) -> None:
        self._device, self.bias = device, bias
        self.segments: list[Segment] = []
        self.width = 0
        for matrix in matrices:
            self.segments.append(Segment(matrix, self.width))
            self.width += matrix.shape[0] if isinstance(matrix, torch.Tensor) else matrix.rows
        first = matrices[0]
        self.cols = int(first.shape[1]) if isinstance(first, torch.Tensor) else first.cols

    def forms(self, rows: int) -> tuple[Form, ...]:
        """What the input must be written as, for a step of so many rows; one, unless kinds of matrices are mixed."""
        return tuple(dict.fromkeys(self._form(segment, rows) for segment in self.segments))

    def splits(self, rows: int) -> int:
        """Partial sums of the output."""
        if any(isinstance(segment.matrix, torch.Tensor) for segment in self.segments):
            return 1
        tiles = -(-self.width // _ROWS) * -(-rows // _token_tile(rows))
        blocks = self.cols // _COLUMNS
        return max(1, min(_MAX_SPLITS, 2 * self._device.processors // tiles, blocks // 4))

    def launch(self, rows: int, inputs: Buffers, partials: torch.Tensor) -> None:
        """Write float32 partials [splits, rows, width], contiguous."""
        splits = self.splits(rows)
        for segment in self.segments:
            source = inputs(self._form(segment, rows))
            matrix = segment.matrix
            if isinstance(matrix, PlainMatrix):
                _multiply_plain(matrix, source, partials, rows, segment.column, splits, self._device)
            else:
                _multiply_floats(matrix, source, partials, rows, segment.column)

    def _form(self, segment: Segment, rows: int) -> Form:
        matrix = segment.matrix
        return _FLOAT_FORMS[matrix.dtype] if isinstance(matrix, torch.Tensor) else Form("f16")


class Merger:
    """Makes merged products, each once."""

    def __init__(self, weights: Weights, device: DeviceProfile) -> None:
        self._weights, self._device = weights, device
        self._made: dict[tuple[TensorName, ...], MergedLinear] = {}

    def merge(self, linears: Sequence[Linear]) -> MergedLinear:
        """Products that share an input."""
        key = tuple(linear.weight for linear in linears)
        if key not in self._made:
            matrices = [self._weights.matrices[name] for name in key]
            self._made[key] = MergedLinear(matrices, self._weights.bias(tuple(linears)), self._device)
        return self._made[key]

    def merge_all(self, operations: Iterable[Operation]) -> list[MergedLinear]:
        """All products of a program, neighbours with the same input merged."""
        runs = itertools.groupby(operations, lambda op: op.source if isinstance(op, Project) else None)
        parts = ([op.linear for op in run if isinstance(op, Project)] for _, run in runs)
        return [self.merge(part) for part in parts if part]


def partial_floats(linears: Iterable[MergedLinear], row_counts: Iterable[int]) -> int:
    """float32 of the largest partial sums of these products, for these numbers of rows."""
    counts = list(row_counts)
    return max(linear.splits(rows) * rows * linear.width for linear in linears for rows in counts)


def _token_tile(rows: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rows)))


def _multiply_plain(
    matrix: PlainMatrix, source: ActivationBuffer, partials: torch.Tensor, rows: int, column: int, splits: int,
    device: DeviceProfile,
) -> None:  # fmt: skip
    tokens = _token_tile(rows)
    grid = (-(-matrix.rows // _ROWS), -(-rows // tokens), splits)
    _, stride, _ = partials.stride()
    multiply[grid](
        source.values, source.cols, source.scales, partials[:, :, column:], partials.stride(0), stride, matrix.rows,
        matrix.cols, rows, **matrix.arrays, **matrix.constants, SPLITS=splits,
        COMPUTE=tl.float16 if device.is_gpu else tl.float32, TOKENS=tokens, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip


def _multiply_floats(
    matrix: torch.Tensor, source: ActivationBuffer, partials: torch.Tensor, rows: int, column: int
) -> None:
    x, out = source.values[:rows], partials[0, :rows, column : column + matrix.shape[0]]
    if x.dtype == torch.float32 or not x.is_cuda:
        torch.mm(x.float(), matrix.t().float(), out=out)
    else:
        out.copy_(torch.mm(x, matrix.t(), out_dtype=torch.float32))
    if source.form.kind == "f16":
        out.mul_(source.scales[:rows, None])

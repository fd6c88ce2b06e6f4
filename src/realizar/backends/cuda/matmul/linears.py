"""Products that share an input, merged into one output, whatever their matrices are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import triton

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import product_type
from realizar.backends.cuda.kernels.weights import multiply
from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.folded_norm import DeferredNorm
from realizar.backends.cuda.matmul.fp8_copies import (
    FORM,
    LEAST_ROWS,
    FP8Copy,
    copy_bytes,
    copy_matrices,
    is_copied,
    prepare_copying,
)
from realizar.backends.cuda.matmul.gated import launch_gated, route_gated
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, Form
from realizar.backends.cuda.matmul.quantized import HalfActivations, Int8Activations, ProductConfig, Products
from realizar.backends.cuda.matmul.residual import Residual, launch_residual, route_residual
from realizar.backends.cuda.native.sources import GatedActivation
from realizar.backends.cuda.weights.load import Matrix, matrix_bytes
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.plain import PlainMatrix

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
        bias: float32 over all columns, or None; added where sums are whole: by the kernel that sums the splits, or by
            the product that joins the stream.
        products: of packed matrices; None where there are none.
        activation: of the feed-forward whose gate and up these are, where the product that reads its result is packed.
        joins: whether its sums go to the residual stream, through no norm.

    Attributes:
        copy: of all matrices, in FP8, for steps of many rows; None where there is none.
    """

    def __init__(
        self, matrices: Sequence[Matrix], bias: torch.Tensor | None, device: DeviceProfile, products: Products | None,
        activation: GatedActivation | None = None, joins: bool = False,
    ) -> None:  # fmt: skip
        self._device, self._products, self.bias = device, products, bias
        self._activation, self._joins = activation, joins
        self._routes: dict[int, list[ProductConfig]] = {}
        self.copy: FP8Copy | None = None
        self.segments: list[Segment] = []
        self.width = 0
        for matrix in matrices:
            self.segments.append(Segment(matrix, self.width))
            self.width += int(matrix.shape[0]) if isinstance(matrix, torch.Tensor) else matrix.rows
        first = matrices[0]
        self.cols = int(first.shape[1]) if isinstance(first, torch.Tensor) else first.cols

    @property
    def weight_bytes(self) -> int:
        """All matrices, as packed."""
        return sum(matrix_bytes(segment.matrix) for segment in self.segments)

    def forms(self, rows: int) -> tuple[Form, ...]:
        """What the input must be written as, for a step of so many rows; one, unless kinds of matrices are mixed."""
        if self._copy_for(rows) is not None:
            return (FORM,)
        return tuple(dict.fromkeys(self._form(segment, rows) for segment in self.segments))

    def splits(self, rows: int) -> int:
        """Partial sums of the output; where kinds of matrices are mixed, unpacked ones fill the first alone."""
        if self._copy_for(rows) is not None:
            return 1
        routes = self.routes(rows)
        if routes:
            return routes[0][1].splits
        if any(isinstance(segment.matrix, torch.Tensor) for segment in self.segments):
            return 1
        tiles = -(-self.width // _ROWS) * -(-rows // _token_tile(rows))
        blocks = self.cols // _COLUMNS
        return max(1, min(_MAX_SPLITS, 2 * self._device.processors // tiles, blocks // 4))

    def routes(self, rows: int) -> list[tuple[PackedMatrix, ProductConfig]]:
        """The packed matrices, and how each is multiplied in a step of so many rows; none where their copy is."""
        if self._copy_for(rows) is not None:
            return []
        packed = _packed(self)
        if not packed or self._products is None:
            return []
        if rows not in self._routes:
            whole = self._whole_route(rows, self._products, packed[0])
            self._routes[rows] = self._products.route_merged(rows, packed) if whole is None else [whole]
        return list(zip(packed, self._routes[rows], strict=True))

    def _whole_route(self, rows: int, products: Products, matrix: PackedMatrix) -> ProductConfig | None:
        """How the product ends with more than its sums, if it does."""
        if self._activation is not None:
            return route_gated(products, rows, matrix, self._activation)
        return route_residual(products, rows, matrix) if self._joins and len(self.segments) == 1 else None

    @property
    def interleaved(self) -> bool:
        """Whether columns of gate and up take turns, 64 of each, as `PackedMatrix` says."""
        first = self.segments[0].matrix
        return isinstance(first, PackedMatrix) and first.interleaved

    def is_gated(self, rows: int) -> bool:
        """Whether `launch_gated` takes a step of so many rows: no partial sums are written then."""
        return self._activation is not None and self._ends(rows)

    def joins(self, rows: int) -> bool:
        """Whether `launch_residual` takes a step of so many rows: no partial sums are written then."""
        return self._joins and self._ends(rows)

    def _ends(self, rows: int) -> bool:
        """Whether the product of a step of so many rows ends with more than its sums."""
        products, routes = self._products, self.routes(rows)
        if products is None or not routes:
            return False
        matrix, config = routes[0]
        return products.runs(matrix, config)

    def kernels(self, rows: int) -> list[tuple[tuple[FragmentFormat, ...], ProductConfig]]:
        """What `Products.prepare` must compile for a step of so many rows."""
        routes = self.routes(rows)
        if not routes:
            return []
        if self.all_packed:
            return [(tuple(matrix.format for matrix, _ in routes), routes[0][1])]
        return [((matrix.format,), config) for matrix, config in routes]

    def launch(self, rows: int, inputs: Buffers, partials: torch.Tensor, norm: DeferredNorm | None = None) -> None:
        """Write float32 partials [splits, rows, width], contiguous; finish `norm`, if `finishes_norms`."""
        copy = self._copy_for(rows)
        if copy is not None:
            copy.multiply(inputs(FORM), rows, partials)
            return
        routes = self.routes(rows)
        if self._products is not None and self.all_packed:
            matrices, config = [matrix for matrix, _ in routes], routes[0][1]
            activations = as_activations(inputs(self._form(self.segments[0], rows)), norm)
            self._products.launch_merged(matrices, activations, partials, rows, config)
            return
        splits = 1 if routes else self.splits(rows)
        if routes:
            partials[1:].zero_()
        configs = iter(routes)
        for segment in self.segments:
            source = inputs(self._form(segment, rows))
            matrix = segment.matrix
            if isinstance(matrix, PackedMatrix):
                assert self._products is not None
                _, config = next(configs)
                self._products.launch(matrix, as_activations(source), partials, rows, config, column=segment.column)
            elif isinstance(matrix, PlainMatrix):
                _multiply_plain(matrix, source, partials, rows, segment.column, splits, self._device)
            else:
                _multiply_floats(matrix, source, partials, rows, segment.column)

    def launch_gated(
        self, rows: int, inputs: Buffers, target: ActivationBuffer, norm: DeferredNorm | None = None
    ) -> None:
        """Write the input of the feed-forward's last product, which has the form of this one's."""
        (matrix, config), form = self.routes(rows)[0], self._form(self.segments[0], rows)
        source, written = as_activations(inputs(form), norm), as_activations(target)
        assert self._products is not None
        assert target.form == form
        launch_gated(self._products, matrix, source, written, rows, config)

    def launch_residual(self, rows: int, inputs: Buffers, residual: Residual) -> None:
        """Add to the stream, and begin the norm that follows."""
        (matrix, config), form = self.routes(rows)[0], self._form(self.segments[0], rows)
        assert self._products is not None
        launch_residual(self._products, matrix, as_activations(inputs(form)), residual, rows, config)

    @property
    def all_packed(self) -> bool:
        """Whether the CUDA products alone read the input, in one launch, but for steps that the FP8 copy takes."""
        return all(isinstance(segment.matrix, PackedMatrix) for segment in self.segments)

    def finishes_norms(self, rows: int) -> bool:
        """Whether a step of so many rows may leave a norm's root to `launch`."""
        return self.all_packed and self._copy_for(rows) is None

    def _copy_for(self, rows: int) -> FP8Copy | None:
        """What a step of so many rows reads in place of the matrices, if anything."""
        return self.copy if rows >= LEAST_ROWS else None

    def _form(self, segment: Segment, rows: int) -> Form:
        matrix = segment.matrix
        if isinstance(matrix, PackedMatrix):
            assert self._products is not None
            form = self._products.activation_format(rows)
            return Form(form.kind, form.block_rows)
        return _FLOAT_FORMS[matrix.dtype] if isinstance(matrix, torch.Tensor) else Form("f16")


def copy_to_fp8(
    linears: Sequence[MergedLinear], products: Products, sums: torch.dtype, copied: Callable[[float], None]
) -> int:
    """Give all that is packed, and of sizes that FP8 products take, a copy; `copied` gets the share done.

    Returns the bytes of all copies.

    Args:
        sums: from `fp8_copies.sum_type`.
    """
    wanted = [one for one in linears if one.all_packed and is_copied(one.width, one.cols)]
    matrices = [_packed(one) for one in wanted]
    prepare_copying(products, [matrix for group in matrices for matrix in group])
    for done, (linear, group) in enumerate(zip(wanted, matrices, strict=True)):
        linear.copy = copy_matrices(products, group, sums)
        copied((done + 1) / len(wanted))
    return sum(copy_bytes(linear.width, linear.cols) for linear in wanted)


def _packed(linear: MergedLinear) -> list[PackedMatrix]:
    return [segment.matrix for segment in linear.segments if isinstance(segment.matrix, PackedMatrix)]


def partial_floats(linears: Iterable[MergedLinear], row_counts: Iterable[int]) -> int:
    """float32 of the largest partial sums of these products, for these numbers of rows, once they are prepared."""
    counts = list(row_counts)
    return max(
        0 if linear.is_gated(rows) or linear.joins(rows) else linear.splits(rows) * rows * linear.width
        for linear in linears
        for rows in counts
    )


def _token_tile(rows: int) -> int:
    return min(64, max(16, int(triton.next_power_of_2(rows))))


def as_activations(source: ActivationBuffer, norm: DeferredNorm | None = None) -> Int8Activations | HalfActivations:
    """A buffer of one of the CUDA products' formats as they take it; `norm` is what they must still do to it."""
    if source.form.kind == "int8":
        return Int8Activations(source.codes, source.terms, norm)
    return HalfActivations(source.values, source.scales, norm)


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
        COMPUTE=product_type(device), TOKENS=tokens, ROWS=_ROWS, COLUMNS=_COLUMNS,
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

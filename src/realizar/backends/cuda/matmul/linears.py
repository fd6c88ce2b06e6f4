"""`MergedLinear`: matrices that share an input, multiplied as one, whatever formats they are packed in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TypeAlias

import torch
import triton

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import TRITON_TYPES, matmul_type
from realizar.backends.cuda.kernels.plain_matmul import multiply, multiply_floats
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.fixed_order import is_gated
from realizar.backends.cuda.matmul.fp8 import (
    FP8_INPUT,
    decoded_bytes,
    launch_fp8,
    launch_fp8_gated,
    least_tokens,
    route_fp8,
)
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.quantized import (
    MATRIX_SIZES,
    SHAPE_SIZES,
    MatmulConfig,
    MatmulKernels,
    shape_arguments,
)
from realizar.backends.cuda.matmul.residual import Residual, launch_residual, route_residual
from realizar.backends.cuda.native.sources import Epilogue, FP8Tiles, GatedActivation, matmul_source
from realizar.backends.cuda.weights.experts import matrix_bytes
from realizar.backends.cuda.weights.load import Group, Matrix, Weights
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.plain import PlainMatrix
from realizar.backends.program import Program
from realizar.models.parts import Linear

_FLOAT_FORMATS = {
    torch.float32: InputFormat("f32"),
    torch.float16: InputFormat("f16"),
    torch.bfloat16: InputFormat("bf16"),
}
_OUT_FEATURES, _COLUMNS, _MOST_TOKENS = 64, 64, 64  # a tile of the matmuls of unpacked matrices
_MAX_SPLITS = 8

Buffers: TypeAlias = Callable[[InputFormat, int], ActivationBuffer]
"""The buffer of a format and a number of columns: of `ActivationBuffers`."""


class MergedLinear:
    """Matrices side by side, in the order of their columns.

    Args:
        bias: float32 over all columns, or None; added where sums are whole: by the kernel that sums the splits, or by
            the residual-add epilogue.
        matmuls: of packed matrices; None where there are none.
        activation: of the feed-forward whose gate and up these are, where the consumer of its result is packed.
        adds_residual: whether its sums go to the residual stream, through no norm.
        batch_invariant: whether a token's sums have one order, whatever the number of tokens.
        fp8_tokens: tokens of a step, padded, from which on packed matrices are multiplied in 8-bit floats
            (`matmul.fp8`); 0 where they never are.
        reads_halves: whether the reader of its sums takes halves, as a norm does.

    Attributes:
        matrices: in the order of their columns. packed: the packed ones among them.
        chosen_by: equal for linears of one `MatmulKernels` for which it chooses the same kernels.
    """

    def __init__(
        self, matrices: Sequence[Matrix], bias: torch.Tensor | None, device: DeviceProfile,
        matmuls: MatmulKernels | None, activation: GatedActivation | None = None, adds_residual: bool = False,
        batch_invariant: bool = False, fp8_tokens: int = 0, reads_halves: bool = False,
    ) -> None:  # fmt: skip
        self._reads_halves = reads_halves
        self._device, self._matmuls, self.bias, self._fp8_tokens = device, matmuls, bias, fp8_tokens
        self._activation, self._adds_residual, self._fixed = activation, adds_residual, batch_invariant
        self.matrices = tuple(matrices)
        rows = (int(each.shape[0]) if isinstance(each, torch.Tensor) else each.out_features for each in matrices)
        *self._columns, self.width = accumulate(rows, initial=0)
        self.packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
        first = matrices[0]
        self.cols = int(first.shape[1]) if isinstance(first, torch.Tensor) else first.in_features
        options = activation, adds_residual, fp8_tokens, reads_halves, bias is not None
        self.chosen_by: Hashable = (*map(_shape_of, matrices), *options)
        self._routes = {} if matmuls is None else matmuls.routes.setdefault(self.chosen_by, {})

    @property
    def weight_bytes(self) -> int:
        return sum(map(matrix_bytes, self.matrices))

    def input_formats(self, kind: StepKind) -> tuple[InputFormat, ...]:
        """Formats that the input must be written in; one, unless kinds of matrices are mixed."""
        return tuple(dict.fromkeys(self._input_format(matrix, kind) for matrix in self.matrices))

    def splits(self, kind: StepKind) -> int:
        """Partial sums of the output; where kinds of matrices are mixed, unpacked ones fill the first alone."""
        if (config := self.route(kind)) is not None:
            return config.splits
        if any(isinstance(matrix, torch.Tensor) for matrix in self.matrices):
            return 1
        tiles = -(-self.width // _OUT_FEATURES) * (1 if self._fixed else -(-kind.tokens // _token_tile(kind.tokens)))
        blocks = self.cols // _COLUMNS
        return max(1, min(_MAX_SPLITS, 2 * self._device.processors // tiles, blocks // 4))

    def route(self, kind: StepKind) -> MatmulConfig | None:
        """How packed matrices are multiplied in a step of this kind; None without any."""
        if not self.packed or self._matmuls is None:
            return None
        if kind.tokens not in self._routes:
            self._routes[kind.tokens] = self._choose_route(kind, self._matmuls)
        return self._routes[kind.tokens]

    def _choose_route(self, kind: StepKind, matmuls: MatmulKernels) -> MatmulConfig:
        reads_halves = self._reads_halves and len(self.matrices) == 1
        if self._in_fp8(kind):
            config = route_fp8(matmuls, kind.tokens, self.packed, self._activation)
            halves = reads_halves and config.splits == 1 and matmuls.leave_as_halves(self.packed)
            return replace(config, halves=halves, splits=config.splits if self.all_packed else 1)
        epilogue = self._epilogue_route(kind.tokens, matmuls)
        return epilogue or matmuls.route_merged(kind.tokens, self.packed, reads_halves)

    def sum_type(self, kind: StepKind) -> torch.dtype:
        """Of the partial sums: float16, divided by `HALF_FACTOR` of `kernels.reduce`, in some long steps."""
        config = self.route(kind)
        return torch.float16 if config is not None and config.halves else torch.float32

    def _epilogue_route(self, tokens: int, matmuls: MatmulKernels) -> MatmulConfig | None:
        if self._activation is not None:
            return route_gated(matmuls, tokens, self.packed[0], self._activation)
        adds = self._adds_residual and len(self.matrices) == 1
        return route_residual(matmuls, tokens, self.packed[0]) if adds else None

    @property
    def interleaved(self) -> bool:
        """True if columns of gate and up alternate, 64 of each, as in `PackedMatrix`."""
        first = self.matrices[0]
        return isinstance(first, PackedMatrix) and first.interleaved

    def is_gated(self, kind: StepKind) -> bool:
        """True if `launch_gated` takes a step of this kind; then no partial sums are written."""
        return self._epilogue(kind) not in (None, "residual")

    def adds_residual(self, kind: StepKind) -> bool:
        """True if `launch_residual` takes a step of this kind; then no partial sums are written."""
        return self._epilogue(kind) == "residual"

    def _epilogue(self, kind: StepKind) -> Epilogue | None:
        config = self.route(kind)
        return None if config is None else config.epilogue

    def kernels(self, kind: StepKind) -> list[tuple[tuple[FragmentFormat, ...], MatmulConfig]]:
        """Formats and configs that `MatmulKernels.prepare` must compile for a step of this kind."""
        config, formats = self.route(kind), tuple(matrix.format for matrix in self.packed)
        if config is None:
            return []
        return [(formats, config)] if self.all_packed else [((each,), config) for each in formats]

    def launch(self, kind: StepKind, inputs: Buffers, partials: torch.Tensor, norm: FoldedNorm | None = None) -> None:
        """Write partials [splits, tokens, width] of `sum_type`, contiguous; finish `norm`, if `applies_norm_scale`."""
        config, tokens = self.route(kind), kind.tokens
        if self._matmuls is not None and config is not None and self.all_packed:
            source = inputs(config.format, self.cols).with_norm(norm)
            if self._in_fp8(kind):
                launch_fp8(self._matmuls, self.packed, source, partials, tokens, config, self._columns)
            else:
                self._matmuls.launch_merged(self.packed, source, partials, tokens, config)
            return
        splits = self.splits(kind) if config is None else 1
        if config is not None:
            partials[1:].zero_()
        for matrix, column in zip(self.matrices, self._columns, strict=True):
            source = inputs(self._input_format(matrix, kind), self.cols)
            if isinstance(matrix, PackedMatrix):
                assert self._matmuls is not None
                assert config is not None
                if self._in_fp8(kind):
                    launch_fp8(self._matmuls, [matrix], source, partials, tokens, config, [column])
                else:
                    self._matmuls.launch(matrix, source, partials, tokens, config, column=column)
            elif isinstance(matrix, PlainMatrix):
                tile = _MOST_TOKENS if self._fixed else _token_tile(tokens)
                _multiply_plain(matrix, source, partials, tokens, column, splits, tile, self._device)
            elif self._fixed:
                _multiply_in_order(matrix, source, partials[0, :tokens, column:])
            else:
                _multiply_floats(matrix, source, partials, tokens, column)

    def launch_gated(
        self, kind: StepKind, inputs: Buffers, target: ActivationBuffer, norm: FoldedNorm | None = None
    ) -> None:
        """Write the input of the feed-forward's last matmul, in the format of this one's."""
        config = self.route(kind)
        assert self._matmuls is not None
        assert config is not None
        source = inputs(config.format, self.cols).with_norm(norm)
        launch_gated(self._matmuls, self.packed[0], source, target, kind.tokens, config)

    def launch_residual(self, kind: StepKind, inputs: Buffers, residual: Residual) -> None:
        config = self.route(kind)
        assert self._matmuls is not None
        assert config is not None
        source = inputs(config.format, self.cols)
        launch_residual(self._matmuls, self.packed[0], source, residual, kind.tokens, config)

    @property
    def all_packed(self) -> bool:
        """True if all matrices are packed: one launch of a CUDA matmul reads the input."""
        return len(self.packed) == len(self.matrices)

    def applies_norm_scale(self, kind: StepKind) -> bool:
        """True if `launch` applies a folded norm scale in a step of this kind."""
        return self.all_packed and not self._in_fp8(kind)

    @property
    def prompts_in_fp8(self) -> bool:
        return self._fp8_tokens > 0

    @property
    def decoded_bytes(self) -> int:
        """Bytes of weights that a launch in 8-bit floats decodes."""
        return decoded_bytes(self.packed) if self.prompts_in_fp8 else 0

    def _in_fp8(self, kind: StepKind) -> bool:
        return self.prompts_in_fp8 and kind.tokens >= self._fp8_tokens

    def _input_format(self, matrix: Matrix, kind: StepKind) -> InputFormat:
        if isinstance(matrix, PackedMatrix) and self._in_fp8(kind):
            return FP8_INPUT
        if isinstance(matrix, PackedMatrix):
            assert self._matmuls is not None
            halves = any(kind.tokens > each.format.matvec_tokens for each in self.packed)  # then all do
            return self._matmuls.activation_format(kind.tokens, halves)
        return _FLOAT_FORMATS[matrix.dtype] if isinstance(matrix, torch.Tensor) else InputFormat("f16")


def _shape_of(matrix: Matrix) -> Hashable:
    if isinstance(matrix, torch.Tensor):
        return matrix.dtype, *matrix.shape
    shape = type(matrix), matrix.out_features, matrix.in_features
    return (*shape, matrix.format, matrix.interleaved) if isinstance(matrix, PackedMatrix) else shape


def distinct(linears: Iterable[MergedLinear]) -> list[MergedLinear]:
    """One of each kind for which the same kernels are chosen."""
    return list({linear.chosen_by: linear for linear in linears}.values())


def describe_routes(linears: Iterable[MergedLinear], counts: Iterable[int]) -> Iterator[str]:
    """A line for each kind of matmul: by numbers of tokens, the format of its input, its kernel and its splits."""
    numbers, seen = sorted(counts), set()
    for linear in linears:
        ways = [(count, _way(linear, StepKind(count))) for count in numbers]
        parts = []
        for way, same in groupby(ways, key=lambda pair: pair[1]):
            of = [count for count, _ in same]
            parts.append(f"{of[0]} to {of[-1]}: {way}" if len(of) > 1 else f"{of[0]}: {way}")
        line = f"matmul of {linear.cols} columns to {linear.width}, by tokens: {'; '.join(parts)}"
        if line not in seen:
            seen.add(line)
            yield line


def _way(linear: MergedLinear, kind: StepKind) -> str:
    input_kinds = "+".join(input_format.kind for input_format in linear.input_formats(kind))
    config = linear.route(kind)
    kernels = "Triton or cuBLAS" if config is None else config.tiles
    epilogue = ""
    if linear.is_gated(kind):
        epilogue = " with the activation epilogue"
    elif linear.adds_residual(kind):
        epilogue = " with the residual-add epilogue"
    return f"{input_kinds} by {kernels}, {linear.splits(kind)} splits{epilogue}"


def partial_floats(linears: Iterable[MergedLinear], token_counts: Iterable[int]) -> int:
    """float32 of the largest partial sums of these matmuls, for these numbers of tokens, once they are prepared."""
    kinds = [StepKind(tokens) for tokens in token_counts]
    return max(
        (
            0
            if linear.is_gated(kind) or linear.adds_residual(kind)
            else linear.splits(kind) * kind.tokens * linear.width
            for linear in linears
            for kind in kinds
        ),
        default=0,
    )


def _token_tile(tokens: int) -> int:
    return min(_MOST_TOKENS, max(16, int(triton.next_power_of_2(tokens))))


def _multiply_plain(
    matrix: PlainMatrix, source: ActivationBuffer, partials: torch.Tensor, tokens: int, column: int, splits: int,
    tile: int, device: DeviceProfile,
) -> None:  # fmt: skip
    grid = (-(-matrix.out_features // _OUT_FEATURES), -(-tokens // tile), splits)
    _, stride, _ = partials.stride()
    multiply[grid](
        source.values, source.cols, source.scales, partials[:, :, column:], partials.stride(0), stride,
        matrix.out_features, matrix.in_features, tokens, **matrix.arrays, **matrix.constants, SPLITS=splits,
        COMPUTE=matmul_type(device), TOKENS=tile, OUT_FEATURES=_OUT_FEATURES, COLUMNS=_COLUMNS,
    )  # fmt: skip


def _multiply_in_order(matrix: torch.Tensor, source: ActivationBuffer, out: torch.Tensor) -> None:
    """out [tokens, >= out_features] = source @ matrix.T, each token's products in one order."""
    (out_features, cols), tokens = matrix.shape, len(out)
    grid = -(-out_features // _OUT_FEATURES), -(-tokens // _MOST_TOKENS)
    multiply_floats[grid](
        source.values, source.cols, source.scales, matrix, out, out.stride(0), out_features, cols, tokens,
        COMPUTE=TRITON_TYPES[source.values.dtype] if source.values.is_cuda else TRITON_TYPES[torch.float32],
        TOKENS=_MOST_TOKENS, OUT_FEATURES=_OUT_FEATURES, COLUMNS=_COLUMNS,
    )  # fmt: skip


def _multiply_floats(
    matrix: torch.Tensor, source: ActivationBuffer, partials: torch.Tensor, tokens: int, column: int
) -> None:
    x, out = source.values[:tokens], partials[0, :tokens, column : column + matrix.shape[0]]
    if x.dtype == torch.float32 or not x.is_cuda:
        torch.mm(x.float(), matrix.t().float(), out=out)
    else:
        out.copy_(torch.mm(x, matrix.t(), out_dtype=torch.float32))
    if source.format.kind == "f16":
        out.mul_(source.scales[:tokens, None])


# A consumer warpgroup of the Hopper kernel holds the sums of gate and up of the same outputs, and so does a block of
# the mat-vec that takes the same tile of two strips. So it can write the next matmul's input. This saves a kernel, and
# the sums of 2 x 14336 columns as float32 with their way through memory.


def route_gated(
    matmuls: MatmulKernels, tokens: int, matrix: PackedMatrix, activation: GatedActivation
) -> MatmulConfig | None:
    """A matmul with the gated epilogue, for `tokens` tokens; None where it has none.

    With `batch_invariant` it has one for every number of tokens or for none.
    """
    activation_format = matmuls.activation_format(tokens, tokens > matrix.format.matvec_tokens)
    if not matrix.interleaved or not matmuls.has_epilogues:
        return None
    if matmuls.batch_invariant and not is_gated(matmuls.tuning, matrix.out_features, matrix.in_features, matrix.format):
        return None
    choose = matmuls.tuning.gated_few if activation_format.kind == "int8" else matmuls.tuning.gated
    tiles = choose(tokens, matrix.out_features, matrix.in_features, matrix.format)
    if tiles is None:
        return None
    staying = matmuls.tuning.staying(tiles, tokens, matrix.in_features, matrix.format)
    return MatmulConfig(staying, activation_format, 1, matmuls.is_dependent(tokens), activation)


def launch_gated(
    matmuls: MatmulKernels, matrix: PackedMatrix, activations: ActivationBuffer, target: ActivationBuffer, tokens: int,
    config: MatmulConfig,
) -> None:  # fmt: skip
    """Start target = activation(gate) * up, of gate and up = activations @ matrix.T, interleaved in `matrix`.

    Args:
        target: of matrix.out_features / 2 columns, in the format `config.format` as `activations`, in other memory. All
            tokens of `half` are divided by one power of two; values beyond 4.2e6 are cut to that. Tokens beyond the
            step's are written up to the end of their block, of `half` and `fp8`.
        config: from `route_gated` for these tokens and this matrix.

    Raises:
        KernelError: the kernel can't be compiled, loaded or launched.
    """
    assert activations.format == target.format
    assert config.epilogue is not None
    if isinstance(config.tiles, FP8Tiles):
        assert config.epilogue != "residual"
        launch_fp8_gated(matmuls, matrix, activations, target, tokens, config)
        return
    source, tiles = matmul_source((matrix.format,), config.tiles, config.epilogue), config.tiles
    out, out_scales = target.addresses
    shape = shape_arguments(activations, tokens, matrix, 1, 0, 0)
    arguments = [*matrix.arguments(out, 0), *shape, out_scales]
    grid, sizes = tiles.grid(matrix.out_features, 1, -(-tokens // tiles.tokens)), MATRIX_SIZES + SHAPE_SIZES + "p"
    matmuls.start(source, matmuls.launched(tiles, grid), tiles.threads, arguments, sizes, config.dependent)


class Merger:
    """Makes the merged matmuls of a program, each once; `batch_invariant` as in `MergedLinear`.

    `prompts_in_fp8`: long steps are multiplied in 8-bit floats, all matmuls from one number of tokens on, but for the
    head, which keeps its precision.
    """

    def __init__(
        self, program: Program, weights: Weights, device: DeviceProfile, matmuls: MatmulKernels | None,
        batch_invariant: bool = False, prompts_in_fp8: bool = False,
    ) -> None:  # fmt: skip
        self._weights, self._device, self._matmuls = weights, device, matmuls
        self._batch_invariant = batch_invariant
        self._head: Group = (program.tail.head.weight,)
        others = (group for key, group in weights.groups.items() if key != self._head)
        packed = [matrix for group in others for matrix in group if isinstance(matrix, PackedMatrix)]
        self._fp8_tokens = least_tokens(packed) if prompts_in_fp8 else 0
        adds_residual = (block.join for block in program.blocks)
        self._residual_adds: set[Group] = {
            (join.linear.weight,) for join in adds_residual if join.linear and join.adds_directly
        }
        self._read_by_norms: set[Group] = {
            (block.join.linear.weight,) for block in program.blocks if block.join.linear and not block.join.reduce
        }
        self._made: dict[Group, MergedLinear] = {}

    def merge(self, linears: Sequence[Linear]) -> MergedLinear:
        key = tuple(linear.weight for linear in linears)
        if key not in self._made:
            bias, matrices = self._weights.bias(tuple(linears)), self._weights.groups[key]
            adds_residual = key in self._residual_adds
            self._made[key] = MergedLinear(
                matrices,
                bias,
                self._device,
                self._matmuls,
                self._activation(key),
                adds_residual,
                self._batch_invariant,
                0 if key == self._head else self._fp8_tokens,
                key in self._read_by_norms,
            )
        return self._made[key]

    def _activation(self, key: Group) -> GatedActivation | None:
        """The activation of the feed-forward that begins with these matrices, if packed matrices consume its result.

        And if those read the same format, and that has a buffer of its own: activations of as many columns as the
        input have the input's.
        """
        feed_forward = self._weights.gated.get(key)
        if feed_forward is None or feed_forward.down.in_features == feed_forward.up.in_features:
            return None
        down = self._weights.groups[(feed_forward.down.weight,)]
        if not all(isinstance(matrix, PackedMatrix) for matrix in down):
            return None
        packed = (matrix for matrix in (*self._weights.groups[key], *down) if isinstance(matrix, PackedMatrix))
        return feed_forward.activation if len({matrix.format.matvec_tokens for matrix in packed}) <= 1 else None

"""Matmuls of activations with quantised weights: the contract that the rest of the backend calls.

    packed = Packer(device).pack([source])              # weights/pack_raw.py: once, at load
    matmuls = MatmulKernels(device, batch_invariant=False)
    activations = matmuls.activation_format(tokens)     # InputFormat(kind, block_tokens): depends on tokens alone
    config = matmuls.route(tokens, packed)              # MatmulConfig: the kernel, its tiles, its splits
    matmuls.launch(packed, x, partials, tokens, config)  # x: an ActivationBuffer of that format

`launch` writes float32 partial sums, partials[split, token, column], into a tensor [splits, >= tokens, token_stride].
It fills tokens 0 .. tokens - 1 and `packed.out_features` columns from `column` on, and nothing else. The kernel after
it sums the splits in order 0, 1, 2, ... and adds the bias. Matrices that share an input and differ in format are
separate `PackedMatrix` segments of one merged output: `route_merged` gives them one config, with which `launch_merged`
runs them in one grid (in two, the second cost 5 us more at one token and 13 at 64).

A matmul may have an epilogue instead of writing partial sums. `gated` writes activation(gate) * up of a feed-forward
whose gate and up are interleaved in one matrix. `residual` adds to the residual stream and begins the next norm.

With programmatic dependent launch (`config.dependent`, compute capability 9.0 on) a matmul requests its first weights
before it waits for the kernel before it, and lets the kernel after it start early. That kernel must itself execute
`griddepcontrol.wait` (Triton: `tl.extra.cuda.gdc_wait()`) before it reads the partials, if it is launched with
`launch_pdl=True`; launched plainly it need do nothing. A matmul reads activations and writes partials only after its
own wait, so it may follow any kernel.

The formats of activations are in `layouts.activations`, the layout of weights in `layouts.fragments`. A matmul can
apply the scale of the RMSNorm that its input comes from, one factor per token: `folded_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from realizar.backends.cuda.device import Family, stream_of
from realizar.backends.cuda.layouts.activations import padded_cols
from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.fixed_order import fixed_tiling
from realizar.backends.cuda.matmul.inputs import NO_NORM, ActivationBuffer, InputFormat, make_buffer
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning, Tiling, load_tuning
from realizar.backends.cuda.native.compiler import Source, architecture, compile_source
from realizar.backends.cuda.native.launcher import Kernel, LoadedKernels
from realizar.backends.cuda.native.sources import (
    AnyTiles,
    Epilogue,
    FP8Tiles,
    Tiles,
    WgmmaTiles,
    activations_source,
    fp8_source,
    fp8_weights_source,
    matmul_source,
)
from realizar.backends.cuda.weights.pack import PackedMatrix

WeightFormats: TypeAlias = tuple[FragmentFormat, ...]
_DEPENDENT_TOKENS = 512  # of a step, up to which programmatic dependent launch pays
MATRIX_SIZES, SHAPE_SIZES = "ppppii", "pp" + "piff" + "iiiii"  # of parameters, in `matmul_source`'s order


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """The kernel of one matmul. Opaque but for `splits`, `format` and `epilogue`.

    Attributes:
        format: of the activations that it reads.
        splits: number of partial sums that it writes.
        dependent: it is launched with programmatic stream serialisation.
        epilogue: of `gated.launch_gated` or `residual.launch_residual`; None where it writes partial sums.
        halves: they are float16, divided by `HALF_FACTOR` of `kernels.reduce`.
    """

    tiles: AnyTiles
    format: InputFormat
    splits: int
    dependent: bool = False
    epilogue: Epilogue | None = None
    halves: bool = False

    def sources(self, formats: WeightFormats) -> list[Source]:
        """The kernels of one launch of matrices of these formats."""
        if not isinstance(self.tiles, FP8Tiles):
            return [matmul_source(formats, self.tiles, self.epilogue, self.halves)]
        activation = None if self.epilogue == "residual" else self.epilogue
        weights = [] if self.tiles.stored else [fp8_weights_source(each) for each in formats]
        return [*weights, fp8_source(len(formats), self.tiles, activation, self.halves)]


class MatmulKernels:
    """The matmul kernels of one device: chooses, compiles, launches. Used by one thread, in one context.

    Attributes:
        routes: chosen so far, by what `MergedLinear` chooses by, and by tokens.
    """

    def __init__(
        self, device: torch.device | str = "cuda", batch_invariant: bool = False,
        without: frozenset[Family] = frozenset(), processors: int | None = None,
    ) -> None:  # fmt: skip
        """Read the device's properties and its tuning table.

        With `batch_invariant` a token's products are added in one order in every batch: see `fixed_order`. `without`
        are families of kernels that are not to be used, `processors` the multiprocessors that there are for them, by
        default all.
        """
        self.device = torch.device(device)
        properties = torch.cuda.get_device_properties(self.device)
        self.capability = (int(properties.major), int(properties.minor))
        self.arch = architecture(self.capability)
        self.batch_invariant = batch_invariant
        shared = int(properties.shared_memory_per_block_optin)
        processors = processors or int(properties.multi_processor_count)
        tuning = load_tuning(properties.name, self.capability, processors, shared)
        self.tuning: DeviceTuning = replace(
            tuning,
            wgmma=tuning.wgmma and "wgmma" not in without,
            int8_tokens=0 if "mat-vec" in without else tuning.int8_tokens,
        )
        self.has_epilogues = "epilogues" not in without
        self.kernels = LoadedKernels(self.arch)
        self.routes: dict[Hashable, dict[int, MatmulConfig]] = {}
        self.decoded_weights, self._decoded_size = torch.empty(0, dtype=torch.uint8, device=self.device), 0
        torch.zeros(1, device=self.device)  # makes the context that kernels are loaded into

    def planned(self) -> MatmulKernels:
        """The same choices, whose kernels are only compiled, by others: of a device that is planned for (`meta`)."""
        made = copy(self)
        made.device, made.kernels = torch.device("meta"), LoadedKernels(self.arch, planned=True)
        return made

    @property
    def packs_floats(self) -> bool:
        """True if bf16 and fp16 matrices are packed as well: where cuBLAS is slower, or has no order that is fixed."""
        return self.tuning.wgmma or self.batch_invariant

    def activation_format(self, tokens: int, halves: bool = False) -> InputFormat:
        """The activation format that a matmul of `tokens` reads; `halves`: some of its matrices have no mat-vec."""
        if not self.batch_invariant and not halves and tokens <= self.tuning.int8_tokens:
            return InputFormat("int8")
        return InputFormat("half", self.tuning.block_tokens(tokens))

    def route(self, tokens: int, matrix: PackedMatrix) -> MatmulConfig:
        return self.route_merged(tokens, [matrix])

    def route_merged(self, tokens: int, matrices: Sequence[PackedMatrix], reads_halves: bool = False) -> MatmulConfig:
        """Choose for segments of one merged output: all run as the largest does, with its splits.

        reads_halves: the reader of the sums takes halves. So they leave a single matrix in long steps on Hopper, but
        with `batch_invariant`.
        """
        activation_format = self.activation_format(tokens, any(tokens > each.format.matvec_tokens for each in matrices))
        largest = max(matrices, key=lambda matrix: matrix.out_features)
        weight_formats = tuple(matrix.format for matrix in matrices)
        out_features = sum(matrix.out_features for matrix in matrices)
        halves = reads_halves and self.leave_as_halves(matrices)
        tiling = self._choose(tokens, activation_format, largest, out_features, weight_formats, 2 if halves else 4)
        tiles = self.tuning.shrunk(tiling.tiles, weight_formats)
        if len(matrices) == 1 and not self.batch_invariant:
            tiles = self.tuning.staying(tiles, tokens, largest.in_features, largest.format)
        halves = halves and isinstance(tiles, WgmmaTiles) and tiles.stays
        splits = min(tiling.splits, min(matrix.format.chunks(matrix.in_features) for matrix in matrices))
        return MatmulConfig(tiles, activation_format, splits, self.is_dependent(tokens), halves=halves)

    def leave_as_halves(self, matrices: Sequence[PackedMatrix]) -> bool:
        """True if the sums of these matrices may leave as halves in long steps."""
        return len(matrices) == 1 and not self.batch_invariant and matrices[0].out_features % 128 == 0

    def is_dependent(self, tokens: int) -> bool:
        """True if matmuls of `tokens` are launched with programmatic stream serialisation."""
        return self.capability >= (9, 0) and tokens <= _DEPENDENT_TOKENS

    def _choose(
        self, tokens: int, activation_format: InputFormat, matrix: PackedMatrix, out_features: int,
        weight_formats: WeightFormats, sum_bytes: int,
    ) -> Tiling:  # fmt: skip
        """For a matrix's format and columns, and `out_features` of all `weight_formats`."""
        if activation_format.kind == "int8":
            return self.tuning.few_tokens(tokens, out_features, matrix.in_features, matrix.format)
        if self.batch_invariant:
            return fixed_tiling(self.tuning, tokens, out_features, matrix.in_features, matrix.format, weight_formats)
        return self.tuning.many_tokens(tokens, out_features, matrix.in_features, matrix.format, sum_bytes)

    def prepare(
        self, wanted: Iterable[tuple[FragmentFormat | WeightFormats, MatmulConfig]],
        compiled: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Compile and load kernels, in parallel where they are not on disk yet; nothing may compile during capture.

        Args:
            wanted: formats of matrices, or of the matrices of a merged launch, each with its config.
            compiled: called, by any thread, with the number compiled so far and the number to compile.

        Raises:
            KernelError: a kernel does not compile or does not fit the device.
        """
        sources = [
            source
            for formats, config in wanted
            for source in config.sources(formats if isinstance(formats, tuple) else (formats,))
        ]
        self.kernels.prepare(sources, compiled)

    def expect_decoded(self, size: int) -> None:
        """Have `decoded` make room for launches of up to so many bytes at once."""
        self._decoded_size = max(self._decoded_size, size)

    def decoded(self, size: int = 0) -> int:
        """The address of memory for a launch's decoded weights, of as many bytes; nothing may grow it in a capture."""
        self.expect_decoded(size)
        if self.decoded_weights.numel() < self._decoded_size:
            self.decoded_weights = torch.empty(self._decoded_size, dtype=torch.uint8, device=self.device)
        return self.decoded_weights.data_ptr()

    def launch(
        self, matrix: PackedMatrix, activations: ActivationBuffer, partials: torch.Tensor, tokens: int,
        config: MatmulConfig, column: int = 0,
    ) -> None:  # fmt: skip
        """Start the split sums of activations @ matrix.T.

        They go to partials[:config.splits, :tokens, column : column + matrix.out_features].

        Args:
            activations: in the format `config.format`, of as many columns.
            partials: float32, or float16 as `config` says, [>= splits, >= tokens, >= column + matrix.out_features], the
                last axis contiguous.
            config: from `route` for these tokens and this matrix.

        Raises:
            KernelError: the kernel can't be compiled, loaded or launched.
        """
        self.launch_merged([matrix], activations, partials, tokens, config, [column])

    def launch_merged(
        self, matrices: Sequence[PackedMatrix], activations: ActivationBuffer, partials: torch.Tensor, tokens: int,
        config: MatmulConfig, columns: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Start the matmuls of matrices of equal columns with the same activations in one grid; formats may differ.

        `columns` are where each begins in the output, one after the other if None. `config` is from `route_merged`; for
        the rest and errors see `launch`.
        """
        assert not isinstance(config.tiles, FP8Tiles)
        assert partials.dtype == (torch.float16 if config.halves else torch.float32)
        weight_formats = tuple(matrix.format for matrix in matrices)
        source, tiles = matmul_source(weight_formats, config.tiles, None, config.halves), config.tiles
        token_blocks = 1 if config.format.kind == "int8" else -(-tokens // tiles.tokens)
        arguments: list[int | float] = []
        blocks = column = 0
        grid = (0, 0, 0)
        for index, matrix in enumerate(matrices):
            column = column if columns is None else columns[index]
            arguments += matrix.arguments(partials.data_ptr() + partials.element_size() * column, blocks)
            grid = tiles.grid(matrix.out_features, config.splits, token_blocks)
            blocks, column = blocks + grid[0], column + matrix.out_features
        strides = partials.stride(1), partials.stride(0)
        arguments += shape_arguments(activations, tokens, matrices[0], config.splits, *strides)
        sizes = MATRIX_SIZES * len(matrices) + SHAPE_SIZES
        grid = self.launched(tiles, (blocks, *grid[1:]))
        self.start(source, grid, tiles.threads, arguments, sizes, config.dependent)

    def launched(self, tiles: Tiles, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """The blocks of a launch, of a grid with one for each tile of the output."""
        return tiles.launched(grid, self.tuning.processors) if isinstance(tiles, WgmmaTiles) else grid

    def start(
        self, source: Source, grid: tuple[int, int, int], threads: int, arguments: Sequence[float], sizes: str,
        dependent: bool,
    ) -> None:  # fmt: skip
        """Start a kernel on torch's current stream; arguments as of `Kernel.launch`, KernelError as of `launch`."""
        stream = stream_of(self.device)
        self.kernels[source].launch(grid, threads, arguments, sizes, stream, dependent)

    def written(self, x: torch.Tensor, input_format: InputFormat) -> ActivationBuffer:
        """float32 [tokens, cols] in a format of these matmuls, new memory: what the backend's own kernels must equal.

        The last block of `half` is filled up with zeros.
        """
        (tokens, cols), chunk_cols = x.shape, padded_cols(x.shape[1])
        made, is_int8 = make_buffer(input_format, cols, tokens, x.device), input_format.kind == "int8"
        arguments = [x.data_ptr(), *made.addresses, tokens, cols, chunk_cols]
        if is_int8:
            name, blocks, threads = "to_int8", -(-tokens * chunk_cols // 128), 128
        else:
            name, blocks, threads = "to_half", len(made.scales), 256
            arguments.append(input_format.block_tokens)
        kernel = Kernel(compile_source(activations_source(), self.arch), name, 0)
        stream, sizes = int(torch.cuda.current_stream(self.device).cuda_stream), "ppp" + "i" * (len(arguments) - 3)
        kernel.launch((blocks, 1, 1), threads, arguments, sizes, stream, False)
        return made


def shape_arguments(
    activations: ActivationBuffer, tokens: int, matrix: PackedMatrix, *splitting: int
) -> tuple[float, ...]:
    """Arguments of a launch as a whole, as SHAPE_SIZES lists them; `splitting`: splits, token stride, split stride."""
    norm = activations.norm.arguments() if activations.norm else NO_NORM
    return *activations.addresses, *norm, tokens, matrix.format.chunks(matrix.in_features), *splitting

"""Sources of matmul kernels: macros from a weight format and a kernel's own parameters. numpy-free, torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeAlias

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.native.compiler import Source, read
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT
from realizar.quantization.layout import WeightLayout

Defines: TypeAlias = dict[str, int | str]
"""Macros of a source."""
KernelKind = Literal["matvec", "wgmma", "mma_sync"]
GatedActivation = Literal["silu", "gelu_tanh", "gelu", "clamped", "relu_squared"]
"""How gate and up become one: activation(gate) * up, or by `clamped` as `models.spec.Experts` says."""
Epilogue = Literal["silu", "gelu_tanh", "gelu", "clamped", "relu_squared", "residual"]
"""An epilogue: the activation of a gated feed-forward, or the residual add."""
FP8_FEATURES = 256
"""Output features of a tile in 8-bit floats."""
_OUT_PITCH = 68 * 4  # bytes of a token's 64 outputs in shared memory: OUT_PITCH of wgmma.cu
_TOKENS_BESIDE = 16  # blocks of tokens that share weights in the second-level cache
ACTIVATIONS: dict[Epilogue, int] = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "clamped": 4, "relu_squared": 5}


@dataclass(frozen=True, slots=True)
class MatvecTiles:
    """Parameters of the kernel for few tokens.

    Attributes:
        tokens: 1 to 7.
        tiles: tiles of 16 output features per block.
        parts: warps of a block that share the columns of a tile.
        unroll: chunks that a warp requests at once.
        blocks: blocks per multiprocessor that registers must allow.
    """

    tokens: int
    tiles: int
    parts: int
    unroll: int
    blocks: int

    kind: Literal["matvec"] = "matvec"

    @property
    def threads(self) -> int:
        return self.tiles * self.parts * 32

    def shared_bytes(self, weight_format: FragmentFormat) -> int:
        """Dynamic shared memory of a block."""
        return 0

    def grid(self, out_features: int, splits: int, token_blocks: int) -> tuple[int, int, int]:
        return -(-out_features // (16 * self.tiles)), splits, 1

    def defines(self) -> Defines:
        return of_fields(self)


@dataclass(frozen=True, slots=True)
class WgmmaTiles:
    """Parameters of the Hopper kernel.

    Attributes:
        tokens: tokens of a block: a multiple of 8 up to 256.
        strips: strips of 64 output features per group.
        groups: of consumer warpgroups.
        stages: of the ring. step: chunks per stage: 1, 2 or 4.
        blocks: per multiprocessor.
        turns: warpgroups of a group, which decode its stages in turn, for few tokens: 1 to `stages`. With several every
            split must have whole stages, and there is no gated epilogue.
        summed: parts of the columns that a block adds in order, each of as many chunks, an even number. With several
            `turns` and `step` are 1, the launch has one split, and there is no gated epilogue.
        stays: a block takes tile after tile, in long steps. Then `step`, `turns`, `summed` and `blocks` are 1, and the
            launch has one matrix with an even number of chunks.
    """

    tokens: int
    strips: int
    groups: int
    stages: int
    step: int
    blocks: int
    turns: int = 1
    summed: int = 1
    stays: bool = False

    kind: Literal["wgmma"] = "wgmma"

    @property
    def registers(self) -> int:
        """Registers that a consumer thread takes over from the producer, or 0 where none need to."""
        large = self.blocks == 1 and self.tokens * self.strips > 128
        return {1: 0, 2: 240, 3: 160}.get(self.groups, 0) if large else 0

    @property
    def threads(self) -> int:
        return self.groups * self.turns * 128 + (128 if self.registers else 32)

    def shared_bytes(self, weight_format: FragmentFormat) -> int:
        weights = self.groups * self.strips * (self.step * weight_format.block_bytes + weight_format.super_bytes)
        sums = self.groups * self.strips * self.tokens * 256 if self.turns > 1 or self.summed > 1 else 0
        if self.stays:  # its outputs do not leave through the ring
            sums = self.groups * self.tokens * _OUT_PITCH
        return self.stages * (weights + self.step * self.tokens * 128) + sums

    def grid(self, out_features: int, splits: int, token_blocks: int) -> tuple[int, int, int]:
        return -(-out_features // (64 * self.strips * self.groups)), splits, token_blocks

    def launched(self, grid: tuple[int, int, int], processors: int) -> tuple[int, int, int]:
        """The blocks of a launch, of a grid with one for each tile: of those that stay as many as fit at once."""
        return (min(math.prod(grid), processors), 1, 1) if self.stays else grid

    def defines(self) -> Defines:
        operands = wgmma_operands("MATMUL", self.tokens // 2, "{{%{}, %{}, %{}, %{}}}, %{}")
        own: Defines = {"REGISTERS": self.registers, "TOKENS_BESIDE": _TOKENS_BESIDE, "TOKENS_TEXT": f'"{self.tokens}"'}
        return of_fields(self) | operands | own


@dataclass(frozen=True, slots=True)
class MmaSyncTiles:
    """Parameters of the kernel for compute capability 8.0 and on.

    Attributes:
        tokens: of an activation block: a multiple of 8 up to 64, or 128 or 256.
        strips: strips of 64 output features per block, a warp for every 16 of them.
        stages: of the ring, at least 3. blocks: per multiprocessor.
    """

    tokens: int
    strips: int
    stages: int
    blocks: int

    kind: Literal["mma_sync"] = "mma_sync"

    @property
    def threads(self) -> int:
        return self.strips * 128

    def shared_bytes(self, weight_format: FragmentFormat) -> int:
        return self.stages * (
            self.strips * (weight_format.block_bytes + weight_format.super_bytes) + min(self.tokens, 64) * 128
        )

    def grid(self, out_features: int, splits: int, token_blocks: int) -> tuple[int, int, int]:
        return -(-out_features // (64 * self.strips)), splits, token_blocks * max(1, self.tokens // 64)

    def defines(self) -> Defines:
        return of_fields(self)


@dataclass(frozen=True, slots=True)
class FP8Tiles:
    """Parameters of the Hopper kernel for 8-bit floats: tiles of 256 output features, of 128 columns a stage.

    Attributes:
        tokens: of a tile: 128.
        stages: of the ring.
        cluster: blocks that share the weights which they copy: 1 or 2.
        beside: clusters of tokens that run beside each other with the same weights.
        stored: weights are e4m3 in fragment order, which need no decoding: see `matmul.stored_fp8`.
    """

    tokens: int = 128
    stages: int = 4
    cluster: int = 2
    beside: int = 8
    stored: bool = False

    kind: Literal["wgmma_fp8"] = "wgmma_fp8"

    @property
    def threads(self) -> int:
        return 384

    @property
    def blocks(self) -> int:
        return 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * (FP8_FEATURES * 128 + self.tokens * 132 + 512)

    def defines(self) -> Defines:
        return of_fields(self) | wgmma_operands("PART", 64, "%{}, %{}") | {"PREDICATE": '"%66"'}


Tiles = MatvecTiles | WgmmaTiles | MmaSyncTiles
AnyTiles = Tiles | FP8Tiles


@cache
def matmul_source(
    weight_formats: tuple[FragmentFormat, ...], tiles: Tiles, epilogue: Epilogue | None = None, halves: bool = False
) -> Source:
    """The kernel for matrices of these formats side by side: blocks in x go to one after the other.

    Its parameters: of each matrix weights, block scales, table, partials, out_features and its first block in x; then
    the activations' two addresses; a folded norm's partial sums of squares, their number, inverse width and epsilon;
    tokens, chunks, splits, token stride and split stride.

    An epilogue is of a kernel for one matrix; None writes partial sums. An activation, in the mat-vec and the Hopper
    kernel: the matrix is a feed-forward's gate and up interleaved; in place of partials it gets the next matmul's codes
    or values, and as its last parameter that one's terms or token scales. `residual`, in the mat-vec: in place of
    partials it gets the stream, and after all else the fields of `ResidualStream` in primitives.cu.

    With `halves` partial sums are float16, divided by `HALF_FACTOR` of `kernels.reduce`: of tiles that stay, and output
    features that are multiples of 128.
    """
    names = "_".join(map(format_name, weight_formats))
    name = f"{tiles.kind}_{names}{f'_{epilogue}' if epilogue else '_halves' if halves else ''}_tokens{tiles.tokens}"
    own = tiles.defines() | epilogue_defines(epilogue) | {"HALVES": int(halves)}
    parts = [define(own), read("primitives.cu")]
    if tiles.kind == "wgmma":
        parts.append(read("bulk.cu"))
    stays = isinstance(tiles, WgmmaTiles) and tiles.stays
    if tiles.kind != "matvec":
        parts.append(read(f"{tiles.kind}_instructions.cu"))
    parts.extend(read(name) for name in epilogue_files(tiles.kind, epilogue))
    for index, weight_format in enumerate(weight_formats):
        defines = format_defines(weight_format)
        parts.append(f"namespace matrix{index} {{\n{define(defines)}")
        parts.extend((read("weights.cu"), read(f"{tiles.kind}.cu")))
        parts.extend([read("long_steps/wgmma.cu")] if stays else [])
        parts.append("".join(f"#undef {key}\n" for key in defines) + "}\n")
    shared = max(tiles.shared_bytes(weight_format) for weight_format in weight_formats)
    return Source(name, "".join(parts) + _entry(name, len(weight_formats), tiles, epilogue), shared)


def format_name(weight_format: FragmentFormat) -> str:
    """A short name of a format, not of it alone."""
    if weight_format.is_float:
        return "floats"
    if weight_format.e2m1:
        return f"e2m1_{weight_format.small}"
    if weight_format.e4m3:
        return "e4m3"
    kind = "vector" if weight_format.vector else f"{'c' if weight_format.codebook else 'q'}{weight_format.bits}"
    return f"{kind}_{weight_format.small}"


def epilogue_files(kind: KernelKind, epilogue: Epilogue | None) -> list[str]:
    if epilogue is None:
        return []
    own = ["matvec_residual.cu"] if epilogue == "residual" else ["gated_epilogue.cu", f"{kind}_gated.cu"]
    return ["codes.cu", *own] if kind == "matvec" else own


def epilogue_defines(epilogue: Epilogue | None) -> Defines:
    if epilogue is None:
        return {}
    if epilogue == "residual":
        return {"RESIDUAL": 1}
    numbers: Defines = {"SWIGLU_ALPHA": f"{SWIGLU_ALPHA}f", "SWIGLU_LIMIT": f"{SWIGLU_LIMIT}f"}
    return {"ACTIVATION": ACTIVATIONS[epilogue]} | (numbers if epilogue == "clamped" else {})


def _entry(name: str, count: int, tiles: Tiles, epilogue: Epilogue | None) -> str:
    parameters = [
        f"const char* w{i}, const float* b{i}, const void* t{i}, float* p{i}, int n{i}, int f{i}" for i in range(count)
    ]
    second = "float2" if tiles.kind == "matvec" else "float"
    parameters.append(f"const char* x, const {second}* scales")
    parameters.append("const float* square_sums, int parts, float inverse_width, float eps")
    parameters.append("int tokens, int chunks, int splits, int token_stride, int split_stride")
    stream, out_scales = "", "nullptr"
    if epilogue == "residual":
        parameters.append("const float* bias, float scale, const float* norm_weight, char* codes, float2* terms")
        parameters.append("float* out_square_sums, int out_parts")
        stream = ", {bias, scale, norm_weight, codes, terms, out_square_sums, out_parts}"
    elif epilogue is not None:
        parameters.append("float* out_scales")
        out_scales = "out_scales"
    stays = isinstance(tiles, WgmmaTiles) and tiles.stays
    lines = [f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks})']
    lines.append(f"{name}({', '.join(parameters)}) {{")
    lines.append("  const Norm norm{square_sums, parts, inverse_width, eps};")
    lines.append(f"  const Shape shape{{tokens, chunks, splits, token_stride, split_stride, norm{stream}}};")
    lines.append("  const int block_x = blockIdx.x;")
    for i in reversed(range(count)):
        condition = f"if (block_x >= f{i}) " if i else ""
        matrix = f"Matrix{{w{i}, b{i}, t{i}, p{i}, n{i}, {out_scales}, 1.f}}"
        call = f"multiply_tiles({matrix}, shape" if stays else f"multiply_matrix({matrix}, shape, block_x - f{i}"
        lines.append(f"  {condition}return matrix{i}::{call}, x, scales);")
    return "\n".join(lines) + "\n}\n"


@cache
def fp8_source(count: int, tiles: FP8Tiles, activation: GatedActivation | None = None, halves: bool = False) -> Source:
    """The kernel in 8-bit floats for `count` matrices side by side, of any format: `fp8_weights_source` decodes them.

    Its parameters: of each matrix its decoded weights and scales, output, out_features and first tile; then the
    activations' two addresses, tokens, chunks, splits, token stride and split stride, and with an activation the next
    matmul's scales. In place of decoded weights `stored` ones have their map, then factors of output features or null.
    `halves` as of `matmul_source`.
    """
    name = f"wgmma_fp8{'_stored' if tiles.stored else ''}_{count}"
    name += f"{f'_{activation}' if activation else '_halves' if halves else ''}_{tiles.cluster}_tokens{tiles.tokens}"
    weights = "const __grid_constant__ TensorMap w{0}, const float* o{0}" if tiles.stored else "const char* w{0}"
    sizes = "const float* s{0}, float* p{0}, int n{0}, int f{0}"
    parameters = [f"{weights}, {sizes}".format(i) for i in range(count)]
    parameters.append("const char* x, const float* scales, int tokens, int chunks, int splits")
    parameters.append("int token_stride, int split_stride")
    parameters.extend(["float* out_scales"] if activation else [])
    lines = ["  auto segment_of = [&](int tile) -> Segment {"]
    for i in reversed(range(count)):
        condition = f"if (tile >= f{i}) " if i else ""
        out_scales = "out_scales" if activation else "nullptr"
        own, features = (f"(const char*)&w{i}", f", o{i}, 0") if tiles.stored else (f"w{i}", "")
        lines.append(f"    {condition}return {{{own}, s{i}, p{i}, n{i}, tile - f{i}, {out_scales}{features}}};")
    lines.append("  };")
    lines.append(f"  const Tiles tiles{{f{count - 1}, n{count - 1}, tokens, splits}};")
    lines.append("  multiply_tiles(Dense{tiles, segment_of, token_stride, split_stride}, chunks, x, scales);")
    return _fp8_kernel(name, tiles, activation, {"HALVES": int(halves)}, ["fp8/dense.cu"], parameters, lines)


@cache
def fp8_experts_source(tiles: FP8Tiles, activation: GatedActivation | None, halves: bool = False) -> Source:
    """The kernel in 8-bit floats for the rows of experts, in tiles of `FP8Tiles.tokens` places, and for any format.

    Its parameters: the stack's decoded weights, or of `stored` ones their map and factors, as of `fp8_source`; scales,
    its biases, the output, with an activation the next matmul's scales, the pairs' weights, the activations' two
    addresses, slots and work as the sort writes them, out_features and chunks.

    Args:
        activation: of interleaved gate and up, whose output lies in tiles; None writes sums to their pairs' rows.
        halves: those sums leave as halves, divided by 16.
    """
    name = f"experts_fp8{'_stored' if tiles.stored else ''}_{activation or ('halves' if halves else 'pairs')}"
    parameters = [
        "const __grid_constant__ TensorMap weights, const float* features" if tiles.stored else "const char* weights",
        "const float* block_scales, const float* bias, char* out, float* out_scales",
        "const float* pair_weights, const char* x, const float* scales, const int* slots, const int* work",
        "int out_features, int chunks",
    ]  # fmt: skip
    lines = ["  __shared__ TileEnd staged[2];", "  __shared__ __align__(8) u64 ends[4];", "  __shared__ int total;"]
    fields = "(const char*)&weights, block_scales, features" if tiles.stored else "weights, block_scales, nullptr"
    fields += ", bias, out, out_scales, pair_weights, slots, work, out_features, chunks"
    lines.append(f"  const Grouped grouped{{{fields}, &total, staged, shared_address(ends)}};")
    lines.append("  if (grouped.first() >= load_listed(work) * grouped.columns()) return;")
    lines.append("  multiply_tiles(grouped, chunks, x, scales);")
    own: Defines = {"GATHER": 0, "HALVES": int(halves)}
    return _fp8_kernel(name, tiles, activation, own, ["grouped/work.cu", "fp8/experts.cu"], parameters, lines)


def _fp8_kernel(
    name: str, tiles: FP8Tiles, activation: GatedActivation | None, own: Defines, work: list[str],
    parameters: list[str], lines: list[str],
) -> Source:  # fmt: skip
    """`work`: the files of its work; `lines`: the kernel's body."""
    files = ["primitives.cu", "bulk.cu", "experts/clusters.cu", "fp8/wgmma_instructions.cu"]
    if activation is not None:
        files += ["codes.cu", "gated_epilogue.cu", "fp8/wgmma_gated.cu"]
    clusters = f" __cluster_dims__({tiles.cluster}, 1, 1)" if tiles.cluster > 1 else ""
    head = f'extern "C" __global__ void{clusters} __launch_bounds__({tiles.threads}, {tiles.blocks})'
    body = "\n".join([head, f"{name}({', '.join(parameters)}) {{", *lines, "}\n"])
    defines = define(tiles.defines() | epilogue_defines(activation) | own)
    return Source(name, defines + "".join(map(read, [*files, *work, "fp8/wgmma.cu"])) + body, tiles.shared_bytes)


@cache
def fp8_weights_source(weight_format: FragmentFormat) -> Source:
    """Weights of a format as `fp8_source` reads them.

    Its parameters: the weights, block scales and table of one matrix or of several, the decoded weights and scales,
    bytes from matrix to matrix, strips and chunks.
    """
    name = f"decode_fp8_{format_name(weight_format)}"
    numbers: Defines = {"POWER": weight_format.fp8_power, "NAME": name}
    files = ("primitives.cu", "weights.cu", "fp8/decode.cu")
    return Source(name, define(format_defines(weight_format) | numbers) + "".join(map(read, files)))


def activations_source() -> Source:
    """Float activations to both formats of activations."""
    names = define({"NAME_INT8": "to_int8", "NAME_HALF": "to_half"})
    return Source("activations", names + "".join(map(read, ("primitives.cu", "codes.cu", "activations.cu"))))


def repack_source(layout: WeightLayout, weight_format: FragmentFormat) -> Source:
    """Raw blocks of a layout to its format: two kernels, `scale_tops` and `pack_blocks`."""
    names: Defines = {"NAME_TOPS": "scale_tops", "NAME_PACK": "pack_blocks", f"TYPE_{layout.name}": 1}
    return Source(f"repack_{layout.name.lower()}", define(format_defines(weight_format) | names) + read("repack.cu"))


def define(values: Mapping[str, int | str]) -> str:
    return "".join(f"#define {key} {value}\n" for key, value in values.items())


def wgmma_operands(name: str, accumulators: int, inputs: str) -> Defines:
    """Texts of a Hopper instruction's operands: its accumulators `c`, and `inputs` with the numbers of the others."""
    return {
        f"{name}_LIST": '"' + ", ".join(f"%{i}" for i in range(accumulators)) + '"',
        f"{name}_INPUTS": '"' + inputs.format(*range(accumulators, accumulators + 6)) + '"',
        f"{name}_OPERANDS": ", ".join(f'"+f"(c[{i}])' for i in range(accumulators)),
    }


def of_fields(numbers: Any) -> Defines:
    """A macro for each field that is a number, by its name in capitals."""
    values = ((field.name.upper(), getattr(numbers, field.name)) for field in fields(numbers))
    return {name: int(value) for name, value in values if isinstance(value, int)}


def format_defines(weight_format: FragmentFormat) -> Defines:
    offset = weight_format.offset
    return of_fields(weight_format) | {
        "SMALL": f"SMALL_{weight_format.small.upper()}",
        "OFFSET": f"{offset!r}f" if offset % 1 else f"{int(offset)}.f",
        "POSITION0": weight_format.positions[0],
        "POSITION1": weight_format.positions[1],
        "CODES_BYTES": weight_format.codes_bytes,
        "TILE_SCALE_BYTES": weight_format.tile_scale_bytes,
        "BLOCK_BYTES": weight_format.block_bytes,
        "SUPER_BYTES": weight_format.super_bytes,
    }

"""The kernel of a chain of matmuls as a source: macros and an entry from its matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import (
    Defines,
    GatedActivation,
    define,
    epilogue_defines,
    format_defines,
    format_name,
    of_fields,
)

LinkKind = Literal["sums", "residual", "gated"]
"""What a matrix of a chain ends with: partial sums, the residual add, an activation."""
Segment: TypeAlias = tuple[LinkKind, FragmentFormat]
"""A matrix of a chain: what it ends with, and its format."""
_SIZES = "ttt" + "ppi" + "iiii" + "pp" + "piff" + "i"
SEGMENT_SIZES: dict[LinkKind, str] = {"sums": _SIZES, "residual": _SIZES + "pfppppi", "gated": _SIZES + "p"}
"""Of a matrix's parameters, in `chain_source`'s order."""
_KINDS: dict[LinkKind, str] = {"sums": "SUMS", "residual": "RESIDUAL_ADD", "gated": "GATED"}
INPUT_BYTES = 96  # of a token's chunk of columns, as in links.cu
_FEW_WARPS = 8  # with which half of a multiprocessor's registers are left to attention


@dataclass(frozen=True, slots=True)
class ChainTiles:
    """Parameters of the kernel.

    Attributes:
        tokens: 1 to 7.
        most_chunks: of the columns of any of its matrices, whole slots.
        slot_chunks: chunks of a tile of 16 output features that are asked for together.
        slot_bytes: of these, at most.
        warps: of a block, that multiply. depth: slots of each. finishers: warps that end units.
    """

    tokens: int
    most_chunks: int
    slot_chunks: int
    slot_bytes: int
    warps: int
    depth: int
    finishers: int

    kind: Literal["chain"] = "chain"

    @property
    def threads(self) -> int:
        return (self.warps + self.finishers + 1) * 32

    @property
    def blocks(self) -> int:
        """Blocks per multiprocessor that registers must allow."""
        return 2 if self.warps <= _FEW_WARPS else 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.warps * self.depth * self.slot_bytes + self.most_chunks * self.tokens * INPUT_BYTES


@cache
def chain_source(segments: tuple[Segment, ...], tiles: ChainTiles, activation: GatedActivation | None) -> Source:
    """The kernel for matrices one after the other; `activation` of those that end with one.

    Its parameters: the count of units, zero, and the number of all units; then of each matrix maps of a tile's low and
    high bits and scales; its block scales, output and out_features; chunks, units, first block and units awaited; its
    input's codes and terms; its folded norm as of `matmul_source`; token stride; and, with the residual add, the fields
    of `ResidualStream`, with an activation the next matmul's terms.
    """
    formats = list(dict.fromkeys(weight_format for _, weight_format in segments))
    letters = "".join(kind[0] for kind, _ in segments)
    parts_of_name = "chain", letters, *map(format_name, formats), *([activation] if activation else [])
    name = f"{'_'.join(parts_of_name)}_tokens{tiles.tokens}"
    own: Defines = of_fields(tiles) | epilogue_defines(activation)
    files = "primitives.cu", "bulk.cu", "codes.cu", *(["gated_epilogue.cu"] if activation else []), "chains/links.cu"
    parts = [define(own), *map(read, files)]
    for index, weight_format in enumerate(formats):
        defines = format_defines(weight_format)
        parts.append(f"namespace format{index} {{\n{define(defines)}{read('weights.cu')}{read('chains/format.cu')}")
        parts.append("".join(f"#undef {key}\n" for key in defines) + "}\n")
    spaces = [f"format{formats.index(weight_format)}" for _, weight_format in segments]
    return Source(name, "".join(parts) + _entry(name, segments, spaces, tiles), tiles.shared_bytes)


def _entry(name: str, segments: Sequence[Segment], spaces: Sequence[str], tiles: ChainTiles) -> str:
    """The kernel; `spaces`: the namespace of each matrix's format."""
    parameters, made, asked, multiplied, finished = ["int* done, int all_units"], [], [], [], []
    for i, ((kind, _), space) in enumerate(zip(segments, spaces, strict=True)):
        last = str(all(each == "sums" for each, _ in segments[i:]) or i + 1 == len(segments)).lower()
        parameters += _parameters(i, kind)
        made.append(_segment(i, kind))
        asked.append(f"    {space}::request_segment<{_KINDS[kind]}>(s{i}, lane, to);")
        multiplied.append(f"    {space}::multiply_segment<{_KINDS[kind]}>(s{i}, done, of, shared);")
        finished.append(f"    finish_segment<{_KINDS[kind]}>(s{i}, {last}, all_units, done, place, factors, shared);")
    lines = [
        f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks})',
        f"{name}({', '.join(parameters)}) {{", *made, read("chains/begin.cu"), "  Place place{warp, lane, 0, 0, -1};",
        "  if (warp == WARPS + FINISHERS) {\n    Ring to(shared, min(lane, WARPS - 1));", *asked,
        "  } else if (warp < WARPS) {\n    char* slots = ring + warp * (DEPTH * SLOT_BYTES);",
        "    Multiplier of{place, Ring(shared, warp), slots, ring + WARPS * (DEPTH * SLOT_BYTES)};", *multiplied,
        "  } else {\n    float factors[TOKENS];", *finished, "  }\n}\n",
    ]  # fmt: skip
    return "\n".join(lines)


def _parameters(i: int, kind: LinkKind) -> list[str]:
    own = {
        "sums": [],
        "residual": [
            f"const float* bias{i}, float scale{i}, const float* weight{i}, char* codes{i}",
            f"float2* out_terms{i}, float* out_square_sums{i}, int out_parts{i}",
        ],
        "gated": [f"float* out_scales{i}"],
    }
    return [
        *(f"const __grid_constant__ TensorMap {plane}{i}" for plane in ("low", "high", "scales")),
        f"const float* b{i}, float* p{i}, int n{i}, int chunks{i}, int units{i}, int start{i}",
        f"int awaited{i}, const char* x{i}, const float2* terms{i}, const float* square_sums{i}, int parts{i}",
        f"float inverse{i}, float eps{i}, int stride{i}", *own[kind],
    ]  # fmt: skip


def _segment(i: int, kind: LinkKind) -> str:
    out_scales = f"out_scales{i}" if kind == "gated" else "nullptr"
    stream = f"bias{i}, scale{i}, weight{i}, codes{i}, out_terms{i}, out_square_sums{i}, out_parts{i}"
    return (
        f"  const Segment s{i}{{{{nullptr, b{i}, nullptr, p{i}, n{i}, {out_scales}, 1.f, nullptr}}, chunks{i},"
        f" units{i}, start{i}, x{i}, terms{i}, {{square_sums{i}, parts{i}, inverse{i}, eps{i}}},"
        f" {{{stream if kind == 'residual' else ''}}}, stride{i}, awaited{i}, &low{i}, &high{i},"
        f" &scales{i}}};"
    )

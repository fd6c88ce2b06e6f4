"""Tiles for instruction sets that the test machine need not have: their assembly."""

from __future__ import annotations

import pytest
from llvmlite import binding, ir

from realizar.backends.cpu.codegen.emit import I64, Emitter
from realizar.backends.cpu.codegen.formats import packed_format
from realizar.backends.cpu.codegen.tile import TileAddresses, TileEmitter
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS, index_of
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.ggml_layouts import GGML_LAYOUTS

_TARGETS = {
    "neon_dot": ("aarch64-unknown-linux-gnu", "+neon,+dotprod", "sdot"),
    "avx_vnni": ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c,+avxvnni", "vpdpbusd"),
    "avx512_vnni": ("x86_64-unknown-linux-gnu", "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+fma,+f16c", "vpdpbusd"),
    "avx2": ("x86_64-unknown-linux-gnu", "+avx2,+fma,+f16c", "vpmaddubsw"),
}


def assembly(instruction_set: str, name: str, tokens: int) -> str:
    """The assembly of a function that computes one tile matmul and stores its rows."""
    triple, features, _ = _TARGETS[instruction_set]
    module = ir.Module("tile")
    module.triple = triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    e = Emitter(builder, INSTRUCTION_SETS[index_of(instruction_set)].lanes)
    *addresses, out = function.args
    tile = TileEmitter(e, packed_format(GGML_LAYOUTS[GGMLType[name]]), instruction_set, tokens)
    for token, sums in enumerate(tile.emit(TileAddresses(*addresses))):
        e.store(sums, e.at(out, token * 4 * e.lanes))
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    machine = binding.Target.from_triple(triple).create_target_machine(features=features, opt=2)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("instruction_set", _TARGETS)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "MXFP4", "IQ2_XXS", "IQ1_M"])
def test_tile_uses_the_dot_instruction(instruction_set: str, name: str) -> None:
    text = assembly(instruction_set, name, 2)
    dot = _TARGETS[instruction_set][2]
    lines = [line for line in text.splitlines() if dot in line.split()[:2]]  # avx_vnni's follow {vex}
    assert len(lines) >= 2 * 8  # a group's eight words, for two tokens
    assert "\tcall" not in text
    assert "\tbl\t" not in text

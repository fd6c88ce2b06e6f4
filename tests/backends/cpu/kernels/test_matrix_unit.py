"""Tiles on the matrix unit, whose instructions are spelt out: the bits of tiles without it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import binding, ir

from backends.cpu.kernels import linear_harness
from backends.cpu.kernels.linear_harness import blocked, random_activations, run_linear
from backends.cpu.kernels.spelt_unit import SpeltUnit
from backends.cpu.packed import pack
from realizar.backends.cpu import instruction_set, kernel
from realizar.backends.cpu.activation_layout import GROUP, RECORD_BYTES
from realizar.backends.cpu.codegen.emit import F32, I64, Emitter
from realizar.backends.cpu.codegen.formats import WeightFormat
from realizar.backends.cpu.codegen.matrix_unit import ROWS, MatrixUnit, Strides
from realizar.backends.cpu.codegen.tile import TileAddresses, TileEmitter
from realizar.backends.cpu.instruction_set import host_features, supported
from realizar.backends.cpu.kernels import linear
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.block_source import block_source
from realizar.quantization.random_blocks import random_blocks

_LANES = 16


def _by_unit(builder: Any, form: WeightFormat, tiles: int) -> None:
    *arguments, factor = builder.function.args
    codes, scales, supers, table, records, groups, *strides, left, out, out_stride = arguments
    tile = TileAddresses(codes, scales, supers, table, records, groups, ROWS * RECORD_BYTES)
    unit = MatrixUnit(SpeltUnit(builder, _LANES), form, tiles)
    builder.ret(unit.emit(tile, Strides(*strides), left, out, out_stride, factor))


def _by_tile(builder: Any, form: WeightFormat, _tiles: int) -> None:
    *arguments, out, out_stride, factor = builder.function.args
    e = Emitter(builder, _LANES)
    emitter = TileEmitter(e, form, "portable", ROWS)
    linear.store_sums(e, emitter.emit(TileAddresses(*arguments, ROWS * RECORD_BYTES)), out, out_stride, factor)
    builder.ret(e.const(ROWS))


def _compiled(emit: Callable[..., None], numbers: int, *given: Any) -> tuple[Any, Any]:
    """A function of so many int64 and a float32, and what owns its code."""
    module = ir.Module()
    module.triple = binding.get_process_triple()
    function = ir.Function(module, ir.FunctionType(I64, [*[I64] * numbers, F32]), "emitted")
    emit(ir.IRBuilder(function.append_basic_block()), *given)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=1
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * numbers, ctypes.c_float)
    return kind(engine.get_function_address("emitted")), engine


@pytest.mark.parametrize(("name", "tiles"), [("Q4_K", 2), ("Q6_K", 1), ("Q2_K", 2), ("Q8_0", 1), ("Q4_1", 2)])
def test_the_bits_are_those_of_tiles(name: str, tiles: int) -> None:
    """Of a whole run of groups and one that may not be, a block more than is decoded for, and rows to spare."""
    ggml_type, rng = GGMLType[name], np.random.default_rng(8)
    tokens, cols = 9 * ROWS + 5, 3 * 256 if ggml_type.block_size == 256 else 11 * GROUP
    data = random_blocks(ggml_type, tiles * _LANES, cols, rng, 0.02)
    matrix = pack(block_source(ggml_type, data, tiles * _LANES, cols), _LANES)
    x, first = random_activations(tokens, cols, rng), rng.standard_normal((tokens, tiles * _LANES)).astype(np.float32)
    records, fields = blocked(x.records, ROWS), matrix.fields(_LANES)
    block_bytes, groups = records.strides[0], fields["groups"]
    expected, got = aligned_zeros(first.size, np.float32), aligned_zeros(first.size, np.float32)
    expected, got = expected.reshape(first.shape), got.reshape(first.shape)
    expected[:], got[:] = first, first
    strides = fields["codes_stride"], fields["scales_stride"], fields["supers_stride"]
    by_tile, _kept = _compiled(_by_tile, 8, matrix.weight_format, tiles)
    places = fields["codes"], fields["scales"], fields["supers"]
    for block in range(8):
        for tile in range(tiles):
            at = [place + tile * stride for place, stride in zip(places, strides, strict=True)]
            out = address(expected) + block * ROWS * expected.strides[0] + tile * 4 * _LANES
            by_tile(*at, fields["table"], address(records) + block * block_bytes, groups, out, got.strides[0], 0.7)
    by_unit, _also_kept = _compiled(_by_unit, 13, matrix.weight_format, tiles)
    done = by_unit(*places, fields["table"], address(records), groups, *strides, block_bytes, tokens, address(got),
                   got.strides[0], 0.7)  # fmt: skip
    assert done == 8 * ROWS
    assert not np.array_equal(got[:done], first[:done])
    np.testing.assert_array_equal(got, expected)


def test_a_kernel_takes_tiles_by_two_and_few_tokens_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported(instruction_set.INSTRUCTION_SETS[instruction_set.index_of("avx512_vnni")], host_features()):
        pytest.skip("the processor has no AVX-512 VNNI")
    monkeypatch.setattr(linear, "Emitter", SpeltUnit)
    monkeypatch.setattr(kernel, "read_kernel", lambda _name: None)  # they are this test's alone
    monkeypatch.setattr(kernel, "keep_kernel", lambda _name, _code: None)
    monkeypatch.setattr(linear_harness, "kernel", linear_harness.kernel.__wrapped__)
    rng = np.random.default_rng(9)
    matrix = pack(block_source(GGMLType.Q8_0, random_blocks(GGMLType.Q8_0, 70, 64, rng, 0.02), 70, 64), _LANES)
    x, bias = random_activations(130, 64, rng), rng.standard_normal(80).astype(np.float32)
    run = {name: linear_harness.kernel(name, matrix.weight_format) for name in ("amx_int8", "avx512_vnni")}
    monkeypatch.setattr(linear_harness, "kernel", lambda name, _form, _add: run[name])
    for tokens, threads in ((23, 1), (24, 1), (37, 3), (100, 1), (130, 3)):
        expected, got = (
            run_linear(name, matrix, x, tokens, threads, bias=bias) for name in ("avx512_vnni", "amx_int8")
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("permitted", [True, False])
def test_the_unit_is_used_where_linux_permits_it(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(instruction_set.INSTRUCTION_SETS[0].features, True)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_set, "_may_use_tiles", lambda: permitted)
    assert instruction_set.select().name == ("amx_int8" if permitted else "avx512_vnni")

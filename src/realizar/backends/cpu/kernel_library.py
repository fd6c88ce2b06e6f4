"""The kernels that a model needs and that are of some kind: made on first use, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from realizar.backends.cpu.codegen.float_tile import FLOAT_TYPES
from realizar.backends.cpu.codegen.formats import WeightFormat, format_number
from realizar.backends.cpu.instruction_set import InstructionSet, index_of
from realizar.backends.cpu.kernel import Kernel
from realizar.backends.cpu.kernels.activate import make_activate
from realizar.backends.cpu.kernels.attention import make_attend
from realizar.backends.cpu.kernels.delta_net import make_mix, make_recur
from realizar.backends.cpu.kernels.expert_linear import (
    make_expert_activate,
    make_expert_float_linear,
    make_expert_linear,
)
from realizar.backends.cpu.kernels.float_linear import make_float_linear
from realizar.backends.cpu.kernels.linear import make_linear
from realizar.backends.cpu.kernels.quantize import ACTIVATIONS
from realizar.backends.cpu.kernels.rotate import make_rotate
from realizar.backends.cpu.kv.layout import KV_DTYPES

_MADE: dict[tuple[Any, ...], Kernel] = {}


class KernelLibrary:
    """Kernels for one instruction set."""

    def __init__(self, instructions: InstructionSet) -> None:
        self._isa = index_of(instructions.name)

    def linear(self, weight_format: WeightFormat, add: bool) -> Kernel:
        return self._made(make_linear, self._isa, format_number(weight_format), int(add))

    def float_linear(self, kind: str, add: bool) -> Kernel:
        return self._made(make_float_linear, self._isa, FLOAT_TYPES.index(kind), int(add))

    def rotate(self, kv_dtype: str) -> Kernel:
        return self._made(make_rotate, KV_DTYPES.index(kv_dtype))

    def attend(self, kv_dtype: str) -> Kernel:
        return self._made(make_attend, self._isa, KV_DTYPES.index(kv_dtype))

    def activate(self, activation: str, gated: bool) -> Kernel:
        return self._made(make_activate, ACTIVATIONS.index(activation), int(gated))

    def mix(self, lanes: int) -> Kernel:
        return self._made(make_mix, lanes)

    def recur(self, lanes: int, columns: int) -> Kernel:
        return self._made(make_recur, lanes, columns)

    def expert_linear(self, weight_format: WeightFormat) -> Kernel:
        return self._made(make_expert_linear, self._isa, format_number(weight_format))

    def expert_float_linear(self, kind: str) -> Kernel:
        return self._made(make_expert_float_linear, self._isa, FLOAT_TYPES.index(kind))

    def expert_activate(self, activation: str, gated: bool) -> Kernel:
        return self._made(make_expert_activate, ACTIVATIONS.index(activation), int(gated))

    @staticmethod
    def _made(make: Callable[..., Kernel], *constants: int) -> Kernel:
        key = (make, *constants)
        if key not in _MADE:
            _MADE[key] = make(*constants)
        return _MADE[key]

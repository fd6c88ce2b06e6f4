"""The kernels that a model needs and that are of some kind: made on first use, each once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from realizar.backends.cpu.codegen.float_tile import FLOAT_TYPES
from realizar.backends.cpu.codegen.formats import WeightFormat, format_number
from realizar.backends.cpu.compile_events import on_compiling
from realizar.backends.cpu.instruction_set import InstructionSet, index_of
from realizar.backends.cpu.kernels.activate import make_activate
from realizar.backends.cpu.kernels.attention import make_attend
from realizar.backends.cpu.kernels.delta_net import make_mix, make_recur
from realizar.backends.cpu.kernels.expert_linear import (
    make_expert_activate,
    make_expert_float_linear,
    make_expert_linear,
)
from realizar.backends.cpu.kernels.float_linear import make_float_linear
from realizar.backends.cpu.kernels.layer_inputs import make_layer_inputs
from realizar.backends.cpu.kernels.linear import make_linear
from realizar.backends.cpu.kernels.quantize import ACTIVATIONS
from realizar.backends.cpu.kernels.rotate import make_rotate
from realizar.backends.cpu.kernels.sampling.adjust import make_adjust
from realizar.backends.cpu.kernels.sampling.logprobs import make_score
from realizar.backends.cpu.kernels.sampling.sample import make_sample
from realizar.backends.cpu.kernels.sampling.truncate import make_draw
from realizar.backends.cpu.kv.layout import KV_DTYPES

_MADE: dict[tuple[Any, ...], Any] = {}


class KernelLibrary:
    """Addresses of kernels for one instruction set.

    `on_compile` is called with a kernel's name when it must be compiled, for about a second; not where it is cached.
    """

    def __init__(self, instructions: InstructionSet, on_compile: Callable[[str], None]) -> None:
        self._isa = index_of(instructions.name)
        self._on_compile = on_compile

    def linear(self, weight_format: WeightFormat, add: bool) -> int:
        return self._address("linear", make_linear, self._isa, format_number(weight_format), int(add))

    def float_linear(self, kind: str, add: bool) -> int:
        return self._address("float linear", make_float_linear, self._isa, FLOAT_TYPES.index(kind), int(add))

    def rotate(self, kv_dtype: str) -> int:
        return self._address("rotate", make_rotate, KV_DTYPES.index(kv_dtype))

    def attend(self, kv_dtype: str) -> int:
        return self._address("attend", make_attend, self._isa, KV_DTYPES.index(kv_dtype))

    def activate(self, activation: str, gated: bool) -> int:
        return self._address("activate", make_activate, ACTIVATIONS.index(activation), int(gated))

    def mix(self, lanes: int) -> int:
        return self._address("delta net: mix", make_mix, lanes)

    def recur(self, lanes: int, columns: int) -> int:
        return self._address("delta net: recur", make_recur, lanes, columns)

    def expert_linear(self, weight_format: WeightFormat) -> int:
        return self._address("expert linear", make_expert_linear, self._isa, format_number(weight_format))

    def expert_float_linear(self, kind: str) -> int:
        return self._address("expert float linear", make_expert_float_linear, self._isa, FLOAT_TYPES.index(kind))

    def expert_activate(self, activation: str, gated: bool) -> int:
        return self._address("expert activate", make_expert_activate, ACTIVATIONS.index(activation), int(gated))

    @property
    def sampling(self) -> dict[str, int]:
        """The kernel that samples, and those that it calls."""
        makes = {"sample": make_sample, "adjust": make_adjust, "draw": make_draw, "score": make_score}
        return {name: self._address(f"sampling: {name}", make) for name, make in makes.items()}

    @property
    def layer_inputs(self) -> int:
        return self._address("layer inputs", make_layer_inputs)

    def _address(self, name: str, make: Callable[..., Any], *constants: int) -> int:
        key = (name, *constants)
        if key not in _MADE:
            with on_compiling(partial(self._on_compile, name)):
                _MADE[key] = make(*constants)
        return int(_MADE[key].address)

"""`emitted` makes an intrinsic of a function that emits its LLVM code."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from numba import types
from numba.extending import intrinsic

# llvmlite's values, as the library has no types. As annotations of an `emitted` function they are numba's types.
Value = Any  # an int64
Float = Any
Double = Any
_TYPES = {"Value": types.int64, "Float": types.float32, "Double": types.float64, "None": types.void}


def emitted(emit: Callable[..., Value]) -> Any:
    """The intrinsic of a function that emits code into a builder, its first parameter.

    The annotations of the others, and of the result, give their types: `Value` is an int64, `Float` a float32, `Double`
    a float64. An `int` is a compile-time constant, and `int | Value` is one where the caller has one.
    """
    _, *hints = [str(each.annotation) for each in signature(emit).parameters.values()]

    @intrinsic(prefer_literal=True)
    @wraps(emit)
    def typed(_context: Any, *given: Any) -> Any:
        kinds = [_type_of(hint, kind) for hint, kind in zip(hints, given, strict=True)]
        if None in kinds:
            return None

        def codegen(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            made = emit(builder, *(getattr(kind, "literal_value", at) for kind, at in zip(kinds, values, strict=True)))
            return context.get_dummy_value() if made is None else made

        return _TYPES[emit.__annotations__["return"]](*kinds), codegen

    return typed


def _type_of(hint: str, given: Any) -> Any:
    """None where a constant is asked for and the caller has none."""
    if "int" in hint and isinstance(given, types.IntegerLiteral):
        return given
    return _TYPES.get(hint.removeprefix("int | "))

"""Mends Triton's interpreter, and has it leave out work that has no effect. Import before kernels.

Under NumPy 2.4 a loop bound of one element is no scalar to it. At each call of a kernel's function by another it looks
through all of `triton.language` for what the launch has already replaced, and at each launch it looks anew. At each sum
and product of integers it computes whether they overflow, in twelve operations, and says so in debug mode alone. It
makes each block's shape and type anew, with their names; and for each operation it finds out anew which type and shape
its operands get, in dozens of comparisons, also where they stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # what any function may refer to


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@cache
def _builtins_of(package: Any) -> list[tuple[str, Any]]:
    members = [(name, getattr(package, name)) for name in dir(package) if hasattr(package, name)]
    return [(name, _interpreted(member)) for name, member in members if tl.core.is_builtin(member)]


def _interpreted(member: Any) -> Any:
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return function(*args, _semantic=semantic, **kwargs)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins_of(package):
        scope.set_attr(package, name, member)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@cache
def _shape(*sizes: int) -> tuple[tl.core.tuple, tl.constexpr]:
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _make_tensor(self: Any, handle: Any, kind: Any) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = kind.tensor_shape if kind.is_block() else _shape()


@cache
def _sizes(*sizes: int) -> tuple[tl.core.tuple, int, Any]:
    shape = tl.core.tuple(list(sizes))
    return shape, validate_block_shape(shape), _shape(*sizes)


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, self.tensor_shape = _sizes(*map(tl.core._unwrap_if_constexpr, shape))
    self.name = f"<{self.shape}, {element_ty}>"


_blocks: dict[tuple[str, int], tl.block_type] = {}


def _with_element_ty(self: Any, kind: Any) -> tl.block_type:
    """One type of each element and shape: shapes of one size are the same object."""
    key = (kind.name, id(self.shape))
    if (found := _blocks.get(key)) is None:
        found = _blocks[key] = tl.block_type(kind, self.shape)
    return found


def _block_to_ir(self: Any, builder: Any) -> Any:
    return self if builder is interpreter.interpreter_builder else _to_ir(self, builder)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if left.is_block():
        if not right.is_block():
            return lhs, _splat(rhs, left)
        return (lhs, rhs) if left.shape is right.shape else TritonSemantic.broadcast_impl_value(self, lhs, rhs)
    return (_splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)


def _splat(scalar: Any, block: Any) -> tl.tensor:
    data = np.empty(block.shape.values, _numpy_type(scalar.type))
    data[...] = scalar.handle.data
    kind = block.with_element_ty(scalar.type)
    return tl.tensor(interpreter.TensorHandle(data, scalar.type), kind)


def _cast(self: Any, value: Any, kind: Any, *rounding: Any, **named: Any) -> Any:
    return value if value.type.scalar is kind.scalar else TritonSemantic.cast(self, value, kind, *rounding, **named)


def _to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
    return value if type(value) is tl.tensor else TritonSemantic.to_tensor(self, value, check_type)


_plans: dict[Any, tuple[Any, Any]] = {}


def _operand(value: Any) -> Any:
    return value.type.name if type(value) is tl.tensor else (type(value), value)


def _operands(self: Any, lhs: Any, rhs: Any, *rules: bool) -> tuple[Any, Any]:
    """What becomes of operands of two types is found once: they stay, are a number's tensor, or fill a block."""
    key = (_operand(lhs), _operand(rhs), rules)
    if (plan := _plans.get(key)) is not None:
        return _made(lhs, plan[0]), _made(rhs, plan[1])
    found = TritonSemantic.binary_op_type_checking_impl(self, lhs, rhs, *rules)
    left, right = (_plan(before, after) for before, after in zip((lhs, rhs), found, strict=True))
    if left is not NotImplemented and right is not NotImplemented:
        _plans[key] = left, right
    return found


def _plan(before: Any, after: Any) -> Any:
    if type(before) is not tl.tensor:
        return after
    if after is before:
        return None
    is_filled = not before.type.is_block() and after.type.is_block() and after.type.scalar == before.type
    return after.type if is_filled else NotImplemented


def _made(given: Any, plan: Any) -> Any:
    return given if plan is None else plan if type(plan) is tl.tensor else _splat(given, plan)


_numpy_type_of = cache(interpreter._get_np_dtype)


def _numpy_type(kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if kind.scalar.is_ptr() else _numpy_type_of(kind.scalar)


interpreter._patch_lang = lambda kernel: _patch_lang(_LANGUAGE)
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._patch_builtin = _patch_builtin
interpreter.InterpretedFunction.__call__ = _call
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._get_np_dtype = _numpy_type
tl.tensor.__init__ = _make_tensor
_to_ir = tl.block_type.to_ir
tl.block_type.__init__, tl.block_type.with_element_ty = _make_block_type, _with_element_ty
tl.block_type.to_ir = _block_to_ir
for _name, _function in {
    "binary_op_type_checking_impl": _operands, "broadcast_impl_value": _broadcast, "cast": _cast,
    "to_tensor": _to_tensor,
}.items():  # fmt: skip
    setattr(interpreter.interpreter_semantic, _name, MethodType(_function, interpreter.interpreter_semantic))

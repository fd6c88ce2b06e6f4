"""Mends Triton's interpreter, and has it leave out work that has no effect. Import before kernels.

Under NumPy 2.4 a loop bound of one element is no scalar to it. At each call of a kernel's function by another it looks
through all of `triton.language` for what the launch has already replaced. At each sum and product of integers it
computes whether they overflow, in twelve operations, and says so in debug mode alone. And it makes each block's shape
and type anew, with their names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

_patch_lang, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # what any function may refer to


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


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
    self.shape, self.numel = _shape(*kind.shape.values) if kind.is_block() else _shape()


@cache
def _block(*sizes: int) -> tuple[tl.core.tuple, int, str]:
    shape = tl.core.tuple(list(sizes))
    return shape, validate_block_shape(shape), str(shape)


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, self.numel, sizes = _block(*map(tl.core._unwrap_if_constexpr, shape))
    self.name = f"<{sizes}, {element_ty}>"


_numpy_type_of = cache(interpreter._get_np_dtype)


def _numpy_type(kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint64) if kind.scalar.is_ptr() else _numpy_type_of(kind.scalar)


interpreter._patch_lang = lambda kernel: _patch_lang(_LANGUAGE)
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter.InterpretedFunction.__call__ = _call
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._get_np_dtype = _numpy_type
tl.tensor.__init__ = _make_tensor
tl.block_type.__init__ = _make_block_type

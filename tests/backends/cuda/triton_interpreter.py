"""Makes Triton's interpreter bear NumPy 2.4: there a loop bound of one element is no scalar. Import before kernels."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor

"""Argument records of the kernels: int64 fields in order, packed by name, and read by name in compiled code."""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate, infer_getattr, infer_global, make_intrinsic_template
from numba.extending import lower_cast, lower_getattr_generic, lower_setattr_generic, models, register_model
from numpy.typing import NDArray

_I64 = ir.IntType(64)
_Number = TypeVar("_Number", bound=np.generic)
_KINDS = {"": types.int64, "f32": types.float32, "f64": types.float64}


class Record:
    """A named list of int64 fields. `Record("tokens scale=f32")` makes fields `tokens` 0 and `scale` 1, a float32.

    In compiled code a global one, called with the address of a record, gives a view of it whose attributes are fields.
    """

    def __init__(self, fields: str) -> None:
        names_and_kinds = [each.partition("=") for each in fields.split()]
        self.names = tuple(name for name, _, _ in names_and_kinds)
        self.index = {name: position for position, name in enumerate(self.names)}
        self.kinds = {name: _KINDS[kind] for name, _, kind in names_and_kinds}
        view = _View(fields, self)

        def look(_context: Any, _address: Any) -> Any:
            return view(types.int64), lambda context, builder, signature, values: values[0]

        infer_global(self, types.Function(make_intrinsic_template(self, look, "look")))

    def __getitem__(self, name: str) -> int:
        return self.index[name]

    def pack(self, values: dict[str, int | float]) -> NDArray[np.int64]:
        """int64 [fields]; a float becomes a float32 in a field's first four bytes. KeyError: missing or unknown."""
        unknown = set(values) ^ set(self.names)
        if unknown:
            raise KeyError(f"fields missing or unknown: {sorted(unknown)}")
        return np.array([_field(values[name]) for name in self.names], np.int64)


class _View(types.Type):  # type: ignore[misc]
    """Numba's type of the address of a record."""

    def __init__(self, fields: str, record: Record) -> None:
        super().__init__(f"Record({fields})")
        self.record = record


@register_model(_View)
class _ViewModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _View) -> None:
        super().__init__(manager, kind, _I64)


@infer_getattr
class _ViewAttributes(AttributeTemplate):  # type: ignore[misc]
    key = _View

    def generic_resolve(self, view: _View, name: str) -> Any:
        return view.record.kinds.get(name)


def _place(context: Any, builder: Any, view: _View, address: Any, name: str) -> Any:
    at = builder.add(address, ir.Constant(_I64, 8 * view.record[name]))
    return builder.inttoptr(at, context.get_value_type(view.record.kinds[name]).as_pointer())


@lower_getattr_generic(_View)
def _read_field(context: Any, builder: Any, view: _View, address: Any, name: str) -> Any:
    return builder.load(_place(context, builder, view, address, name))


@lower_setattr_generic(_View)
def _write_field(context: Any, builder: Any, signature: Any, values: Any, name: str) -> None:
    builder.store(values[1], _place(context, builder, signature.args[0], values[0], name))


@lower_cast(_View, types.int64)
def _address_of(_context: Any, _builder: Any, _view: Any, _type: Any, address: Any) -> Any:
    return address


def _field(value: int | float) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<fi", value, 0))[0])
    return int(value)


def address(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def aligned_zeros(shape: int | tuple[int, ...], dtype: type[_Number], alignment: int = 64) -> NDArray[_Number]:
    """A zeroed array whose first byte is aligned."""
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)

"""`fitted` makes a parsed body fit its record: without fields that nothing knows, and with integers written as 40.0.

Clients without an integer type write integers as decimal fractions.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import inspect

from realizar.server.http.unknown_fields import IgnoredFields, full_path

_type_info = functools.cache(inspect.type_info)


def fitted(data: Any, record: type[msgspec.Struct], ignored: IgnoredFields | None) -> Any:
    """A body with integers for 40.0 and the like where its record takes no fractions. It is changed in place.

    Raises:
        ApiError: 400; a field must not be removed.

    Args:
        ignored: notes the fields that the record, and the records in it, do not know, and that are removed; None leaves
            them.
    """
    return _fitted("", data, _type_info(record), ignored)


def _fitted(path: str, value: Any, kind: inspect.Type, ignored: IgnoredFields | None) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, float):
        takes_integers = any(isinstance(each, inspect.IntType) for each in kinds)
        takes_fractions = any(isinstance(each, inspect.FloatType) for each in kinds)
        return int(value) if takes_integers and not takes_fractions and value.is_integer() else value
    for each in kinds:
        if isinstance(each, inspect.ListType) and isinstance(value, list):
            value[:] = [_fitted(f"{path}[{at}]", item, each.item_type, ignored) for at, item in enumerate(value)]
        elif isinstance(each, inspect.StructType) and isinstance(value, dict):
            fields = {field.encode_name: field.type for field in each.fields}
            for name in list(value):
                if name in fields:
                    value[name] = _fitted(f"{path}.{name}" if path else name, value[name], fields[name], ignored)
                elif ignored is not None:
                    ignored.note(full_path(path, name), value.pop(name))
    return value

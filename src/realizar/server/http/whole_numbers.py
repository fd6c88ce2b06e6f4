"""Integers that requests write as decimal fractions, such as 40.0: clients without an integer type send them."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from msgspec import inspect

_type_info = functools.cache(inspect.type_info)


def with_whole_numbers(data: Any, record: type[msgspec.Struct]) -> Any:
    """A parsed body with integers for 40.0 and the like where its record takes no fractions. It is changed in place."""
    return _converted(data, _type_info(record))


def _converted(value: Any, kind: inspect.Type) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if isinstance(value, float):
        takes_integers = any(isinstance(each, inspect.IntType) for each in kinds)
        takes_fractions = any(isinstance(each, inspect.FloatType) for each in kinds)
        return int(value) if takes_integers and not takes_fractions and value.is_integer() else value
    for each in kinds:
        if isinstance(each, inspect.ListType) and isinstance(value, list):
            value[:] = [_converted(item, each.item_type) for item in value]
        elif isinstance(each, inspect.StructType) and isinstance(value, dict):
            fields = {field.encode_name: field.type for field in each.fields}
            for name in value.keys() & fields.keys():
                value[name] = _converted(value[name], fields[name])
    return value

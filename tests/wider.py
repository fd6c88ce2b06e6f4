"""Matrices of cases: what runs each time, and what in the wider matrix alone (`make test-full`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def wider(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Cases as parameters: `always` run each time, and all others with `--full`.

    Raises:
        ValueError: one of `always` is no case.
    """
    cases = list(cases)
    if absent := [each for each in always if each not in cases]:
        raise ValueError(f"these are no cases: {absent}")
    return [each if each in always else pytest.param(*_values(each), marks=pytest.mark.full) for each in cases]


def diagonal(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Pairs as parameters: each row with one column, and each column with some rows, each time; all with `--full`."""
    rows, columns = list(rows), list(columns)
    pairs = [(row, column) for row in rows for column in columns]
    reach = max(len(rows), len(columns))
    return wider(pairs, *((rows[i % len(rows)], columns[i % len(columns)]) for i in range(reach)))


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)

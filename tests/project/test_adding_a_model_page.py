"""The parameters that docs/adding-a-model.md names are those of the functions that build a spec."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec_builder import SpecBuilder

_PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
_CALL = re.compile(r"`([\w.]+)\((\w+)?(?:=)?[^`]*\)`")
_PLACES = {"builder": SpecBuilder, "hparams": HyperParameters}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "SpecBuilder": SpecBuilder,
    "read_rope": read_rope,
    "read_dimensions": read_dimensions,
}


def _function(name: str) -> Callable[..., Any] | None:
    owner, _, method = name.rpartition(".")
    return getattr(_PLACES.get(owner), method, None) if owner else _FUNCTIONS.get(name)


def wrong(page: str) -> list[str]:
    """Calls of the page whose function or parameter does not exist."""
    found = []
    for name, parameter in _CALL.findall(page):
        function = _function(name)
        known = set() if function is None else set(inspect.signature(function).parameters)
        if function is None or (f"{name}({parameter}=" in page and parameter not in known):
            found.append(f"{name}({parameter})")
    return found


def test_calls_are_as_the_page_says() -> None:
    assert len(_CALL.findall(_PAGE)) > 10
    assert wrong(_PAGE) == []


@pytest.mark.parametrize("call", ["builder.atention(scale=...)", "read_rope(paring=...)", "build(hparams)"])
def test_a_call_that_does_not_exist_is_found(call: str) -> None:
    assert wrong(f"`{call}`")

"""Errors say how to install an extra, in a way that works: the project is in no package index under its name."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import realizar
from realizar import extras
from realizar.extras import how_to_install

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("extra", ["cuda", "otel", "ray"])
def test_the_command_names_the_clone_and_an_extra_that_is_there(extra: str) -> None:
    python, *words, wanted = shlex.split(how_to_install(extra))
    assert (python, words) == (sys.executable, ["-m", "pip", "install", "-e"])
    assert wanted == f"{ROOT}[{extra}]"
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_without_a_clone_it_says_that_one_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "lib" / "realizar" / "extras.py"))
    assert how_to_install("cuda") == f"in a clone of realizar, {sys.executable} -m pip install '.[cuda]'"


def test_an_environment_without_pip_gets_a_line_for_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/a folder/bin/python")
    words = shlex.split(how_to_install("otel"))
    assert words == ["uv", "pip", "install", "--python", "/a folder/bin/python", "-e", f"{ROOT}[otel]"]


def test_every_hint_names_an_extra_that_is_there() -> None:
    extras_there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text(encoding="utf-8") for path in Path(realizar.__file__).parent.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
    assert named == {"cuda", "otel", "ray"}
    assert named <= extras_there.keys()


def test_no_message_names_a_package_that_nobody_owns() -> None:
    sources = [*Path(realizar.__file__).parent.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(sources) > 100
    assert [str(path) for path in sources if "install 'realizar" in path.read_text(encoding="utf-8")] == []

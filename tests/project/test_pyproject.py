"""pyproject.toml and the package agree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import realizar
from realizar import errors

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert realizar.__version__ == project["version"]


def test_every_file_of_the_package_comes_in_its_wheel() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["realizar"]
    folder = ROOT / "src/realizar"
    given = {path for glob in globs for path in folder.glob(glob) if path.is_file()}
    others = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others <= given


def test_dependencies_do_not_bring_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lean = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert not [name for name in lean if name.startswith(("torch", "triton", "transformers", "nvidia", "cuda"))]
    assert all("<" in name and ">=" in name for name in [*lean, *project["optional-dependencies"]["cuda"]])


def test_every_error_says_what_it_is_and_can_be_caught_by_one_name() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert all(issubclass(value, errors.RealizarError) and vars(value)["__doc__"] for value in classes)

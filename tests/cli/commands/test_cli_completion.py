"""Completion in real shells: bash, and zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from waits import HANG_S
from wider import wider

_ZSHRC = """
compadd () {
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then builtin compadd "$@"; return; fi
  local -a hits
  builtin compadd -A hits "$@"
  (( $#hits )) && print -rl -- ${(Q)hits} >> $HITS
  builtin compadd "$@"
}
"""
"""Writes what is offered to a file, beside offering it."""
_LINE_EDITOR_READS = b"\x1b[?2004h"


class Shells:
    """Command lines, completed by a shell in a folder. `realizar` is a script there."""

    def __init__(self, folder: Path, script: Callable[[str], str]) -> None:
        self.folder, self._script = folder, script
        (folder / "bin").mkdir()
        program = folder / "bin" / "realizar"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m realizar "$@"\n')
        program.chmod(0o755)

    def offered(self, shell: str, line: str) -> set[str]:
        """What a shell offers for the last word of a command line."""
        script = self.folder / f"completion.{shell}"
        if not script.exists():
            script.write_text(self._script(shell))
        found: list[str] = getattr(self, f"_{shell}")(script, line)
        return set(found)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
            cwd=self.folder,
            env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
        )
        assert done.stderr == ""
        return done.stdout

    def _bash(self, script: Path, line: str) -> list[str]:
        words = line.split(" ")
        code = (
            f"source {shlex.quote(str(script))};"
            f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=();"
            '_realizar realizar "${COMP_WORDS[-1]}" ""; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        return self._run("bash", "--norc", "-c", code).split()

    def _fish(self, script: Path, line: str) -> list[str]:
        code = f"source {shlex.quote(str(script))}; complete -C {shlex.quote(line)}"
        return [each.partition("\t")[0] for each in self._run("fish", "--no-config", "-c", code).splitlines()]

    def _zsh(self, script: Path, line: str, how: str = "source {}") -> list[str]:
        """zsh completes in its line editor alone, which needs a terminal."""
        start, hits = self.folder / "start", self.folder / "hits"
        start.mkdir(exist_ok=True)
        hits.write_text("")
        (start / ".zshrc").write_text(f"PROMPT=\n{how.format(shlex.quote(str(script)))}\n{_ZSHRC}")
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        variables = {**os.environ, "ZDOTDIR": str(start), "HITS": str(hits), "TERM": "xterm", "PATH": path}
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execvpe("zsh", ["zsh", "-d", "-i"], variables)
        try:
            shown, typed = b"", False
            while select.select([terminal], [], [], HANG_S)[0]:
                try:
                    shown += os.read(terminal, 1 << 16)
                except OSError:  # the shell has ended
                    break
                if not typed and _LINE_EDITOR_READS in shown:
                    os.write(terminal, f"{line}\t\x15exit\n".encode())
                    typed = True
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(terminal)
        return hits.read_text().splitlines()

    def zsh_from_fpath(self, line: str) -> list[str]:
        """What zsh offers where the script is a file of its path of functions."""
        functions = self.folder / "functions"
        functions.mkdir()
        (functions / "_realizar").write_text(self._script("zsh"))
        return self._zsh(functions, line, "fpath=({} $fpath); autoload -Uz compinit; compinit -u")


@pytest.fixture
def shells(realizar: Callable[..., Any], tmp_path: Path) -> Shells:
    folder = tmp_path / "here"
    folder.mkdir()
    return Shells(folder, lambda shell: str(realizar("completion", shell).stdout))


def installed(shell: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return shell


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


def test_commands_and_options(shells: Shells, shell: str) -> None:
    (shells.folder / "small.txt").touch()
    assert shells.offered(shell, "realizar s") == {"serve", "score", "show"}
    assert shells.offered(shell, "realizar serve m.gguf --api-d") == {"--api-defaults"}
    assert shells.offered(shell, "realizar serve m.gguf --api-defaults o") == {"openai"}


def test_models_and_files(shells: Shells, shell: str) -> None:
    (shells.folder / "smooth.gguf").touch()
    (shells.folder / "smallest").mkdir()
    (shells.folder / "small.txt").touch()
    assert shells.offered(shell, "realizar run sm") == {"smollm2:135m", "smallest/", "smooth.gguf"}
    assert shells.offered(shell, f"realizar run {shells.folder}/smo") == {f"{shells.folder}/smooth.gguf"}
    assert shells.offered(shell, "realizar run nonesuch/x") == set()


def test_names_go_on_behind_their_colon(shells: Shells) -> None:
    for shell in (each for each in ("zsh", "fish") if shutil.which(each)):
        assert shells.offered(shell, "realizar run smollm2:1") == {"smollm2:135m"}


@pytest.mark.parametrize("shell", wider(["bash", "zsh", "fish"], "bash"), indirect=True)
def test_rm_completes_what_is_pulled(
    shells: Shells, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (shells.folder / "smooth.gguf").touch()
    assert shells.offered(shell, "realizar rm sm") == set()


def test_zsh_takes_the_script_from_its_path_of_functions(shells: Shells) -> None:
    installed("zsh")
    assert set(shells.zsh_from_fpath("realizar s")) == {"serve", "score", "show"}


@pytest.mark.parametrize(("shell", "line"), [("zsh", "#compdef realizar"), ("fish", "complete -c realizar ")])
def test_scripts_of_shells_that_may_be_absent(realizar: Callable[..., Any], shell: str, line: str) -> None:
    text = realizar("completion", shell).stdout
    assert any(each.startswith(line) for each in text.splitlines())
    assert "bench-serve" in text


def test_an_unknown_shell_is_refused(realizar: Callable[..., Any]) -> None:
    assert realizar("completion", "tcsh").status == 2

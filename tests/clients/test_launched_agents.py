"""Agents that `realizar launch` starts, where they are installed: each calls a tool of its own and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clients.played_model import Turn, play
from server_thread import RunningServer
from waits import HANG_S

SECRET = "The secret word is walrus."
AGENTS = {
    "claude": (("-p",), "Read", "file_path"),
    "codex": (("exec", "--skip-git-repo-check"), "exec_command", "cmd"),
    "opencode": (("run",), "read", "filePath"),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_calls_a_tool(agent: str, played: RunningServer, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()
    note = project / "note.txt"
    note.write_text(SECRET)
    options, tool, argument = AGENTS[agent]
    value = f"cat {note}" if argument == "cmd" else str(note)
    script = play(Turn(calls=((tool, {argument: value}),)), Turn("It says: {results}"))
    words = ["launch", agent, "--url", played.url, "--", *options]
    done = subprocess.run(
        [sys.executable, "-m", "realizar", *words, *([] if agent == "opencode" else [script])],
        env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PWD": str(project)},
        cwd=project,
        input=script if agent == "opencode" else "",  # it would quote an argument again
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "It says: " in done.stdout
    assert SECRET in done.stdout
    assert not [path for path in (home / ".codex/config.toml", home / ".claude/settings.json") if path.exists()]

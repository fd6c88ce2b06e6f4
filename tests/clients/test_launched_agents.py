"""Agents that `realizar launch` starts, where they are installed: each calls a tool of its own and goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from clients.played_hybrid import BLOCK, PlayedHybrid, hybrid_server
from clients.played_model import Turn, play
from server_thread import RunningServer
from waits import HANG_S

Launched = Callable[[str, RunningServer, str], str]
SECRET = "The secret word is walrus."
AGENTS = {
    "claude": (("-p",), "Read", "file_path"),
    "codex": (("exec", "--skip-git-repo-check"), "exec_command", "cmd"),
    "opencode": (("run",), "read", "filePath"),
}


NUM_TURNS = 20


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    """Runs an agent in an empty home, in a folder `project`."""
    home, project = tmp_path / "home", tmp_path / "project"
    for folder in (home, project):
        folder.mkdir()

    def launch(agent: str, server: RunningServer, script: str) -> str:
        words = ["launch", agent, "--url", server.url, "--", *AGENTS[agent][0]]
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
        assert not [path for path in (home / ".codex/config.toml", home / ".claude/settings.json") if path.exists()]
        return done.stdout

    return launch


def call_of(agent: str, path: Path) -> tuple[str, dict[str, str]]:
    """The agent's own tool that reads a file, and its arguments."""
    _, tool, argument = AGENTS[agent]
    return tool, {argument: f"cat {path}" if argument == "cmd" else str(path)}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_calls_a_tool(agent: str, played: RunningServer, launched: Launched, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    note = tmp_path / "project/note.txt"
    note.write_text(SECRET)
    said = launched(agent, played, play(Turn(calls=(call_of(agent, note),)), Turn("It says: {results}")))
    assert "It says: " in said
    assert SECRET in said


def turn_of(agent: str, place: int, path: Path) -> Turn:
    """A call with reasoning or none before it, and now and then without the blanks that a template writes."""
    said, (name, arguments) = f"I read file {place} now.", call_of(agent, path)
    if place % 3 == 0:
        call = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
        return Turn(f"{said}\n<tool_call>\n{call}\n</tool_call>", think="Again?")
    return Turn(said, ((name, arguments),), "" if place % 5 == 4 else f"What may be in file {place}? " * 4 + "Well.")


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_a_model_with_states_computes_what_is_new_of_twenty_turns(
    agent: str, launched: Launched, tmp_path: Path
) -> None:
    """Down to a block, and where an answer comes back otherwise, the words that both begin with."""
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    backend = PlayedHybrid()
    thread = hybrid_server(tmp_path, backend)
    turns = []
    for place in range(NUM_TURNS):
        path = tmp_path / f"project/note{place}.txt"
        path.write_text(f"{SECRET}\n" * (3 + place))
        turns.append(turn_of(agent, place, path))
    try:
        assert "That is all." in launched(agent, thread.start(), play(*turns, Turn("That is all.")))
    finally:
        thread.stop()
    runs = [run for run in backend.runs if len(run.prompt) > len(backend.runs[0].prompt) // 2]  # others name the talk
    assert len(runs) == NUM_TURNS + 1
    for place, (before, run) in enumerate(pairwise(runs), 1):
        shared = run.num_shared(runs[:place])
        assert shared > len(before.prompt) - len("\n assistant\n \n")
        is_whole = shared == len(before.tokens) - 1
        assert shared - run.num_cached < BLOCK + (0 if is_whole else len("\n assistant\n"))
    assert sum(run.num_shared(runs[:place]) > len(runs[place - 1].tokens) - 2 for place, run in enumerate(runs)) > 8

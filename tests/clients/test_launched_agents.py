"""Agents that `realizar launch` starts, where they are installed: each calls a tool of its own and goes on.

What they send is recorded and replayed within a test, and not kept: most of it is prose of their makers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import server_thread
from clients.played_hybrid import BLOCK, PlayedHybrid, Run, hybrid_server, num_common
from clients.played_model import Turn, play
from engine.process.served import kill, serving, wait_saved
from server.test_agent_replay import anthropic_counts, responses_counts
from server_thread import NAME, RunningServer
from waits import HANG_S

SECRET = "The secret word is walrus."
AGENTS = {
    "claude": (("-p",), "Read", "file_path"),
    "codex": (("exec", "--skip-git-repo-check"), "exec_command", "cmd"),
    "opencode": (("run",), "read", "filePath"),
}
COUNTS = {"/v1/messages": anthropic_counts, "/v1/responses": responses_counts}
NUM_TURNS = 20
KILLED_BEFORE = (2, 11)
FILE_BLOCK = 32
OPENING = "\n assistant\n \n"
"""As long as what a prompt ends with where an answer may begin otherwise than it was written."""


def launch(folder: Path, agent: str, server: RunningServer, script: str) -> str:
    """Runs an agent in an empty home, in the folder `project` of `folder`; returns what it prints."""
    home, project = folder / "home", folder / "project"
    home.mkdir()
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


def call_of(agent: str, path: Path) -> tuple[str, dict[str, str]]:
    """The agent's own tool that reads a file, and its arguments."""
    _, tool, argument = AGENTS[agent]
    return tool, {argument: f"cat {path}" if argument == "cmd" else str(path)}


def note_of(folder: Path, name: str, num_lines: int = 1) -> Path:
    """A file in the agent's folder, which is made."""
    (folder / "project").mkdir(exist_ok=True)
    path = folder / "project" / name
    path.write_text(f"{SECRET}\n" * num_lines)
    return path


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_calls_a_tool(agent: str, played: RunningServer, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    call = call_of(agent, note_of(tmp_path, "note.txt"))
    said = launch(tmp_path, agent, played, play(Turn(calls=(call,)), Turn("It says: {results}")))
    assert "It says: " in said
    assert SECRET in said


class Recorder:
    """Keeps the path and the body of each request of a server, in the order in which they ended."""

    def __init__(self, app: ASGIApp, kept: list[tuple[str, bytes]]) -> None:
        self._app, self._kept = app, kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []

        async def kept_receive() -> Message:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        await self._app(scope, kept_receive, send)
        self._kept.append((scope["path"], b"".join(parts)))


@dataclass(frozen=True)
class Talk:
    """What an agent sent in 20 turns, and what each request was to the model with states that answered."""

    model: Path
    requests: list[tuple[str, dict[str, Any]]]
    runs: list[Run]


@pytest.fixture(scope="module", params=["claude", "codex"])
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    agent: str = request.param
    if shutil.which(agent) is None:
        pytest.skip(f"{agent} is not installed")
    folder = tmp_path_factory.mktemp(agent)
    calls = [call_of(agent, note_of(folder, f"note{place}.txt", 3 + place)) for place in range(NUM_TURNS)]
    kept: list[tuple[str, bytes]] = []
    make_app = server_thread.create_app

    def recorded(*args: Any) -> Any:
        app = make_app(*args)
        app.add_middleware(Recorder, kept=kept)
        return app

    backend = PlayedHybrid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_thread, "create_app", recorded)
        thread = hybrid_server(folder, backend)
        try:
            script = play(*(turn_of(place, *call) for place, call in enumerate(calls)), Turn("That is all."))
            assert "That is all." in launch(folder, agent, thread.start(), script)
        finally:
            thread.stop()
    requests = [(path, json.loads(body)) for path, body in kept if path in COUNTS]
    assert len(requests) == len(backend.runs) == NUM_TURNS + 1
    return Talk(folder / "hybrid.gguf", requests, backend.runs)


def turn_of(place: int, name: str, arguments: Mapping[str, str]) -> Turn:
    """A call with reasoning or none before it, and now and then without the blanks that a template writes."""
    said = f"I read file {place} now."
    if place % 3 == 0:
        call = json.dumps({"name": name, "arguments": arguments}, separators=(",", ":"))
        return Turn(f"{said}\n<tool_call>\n{call}\n</tool_call>", think="Again?")
    return Turn(said, ((name, arguments),), "" if place % 5 == 4 else f"What may be in file {place}? " * 4 + "Well.")


def test_a_model_with_states_computes_what_is_new_of_twenty_turns(talk: Talk) -> None:
    """Down to a block, and where an answer comes back otherwise, the words that both begin with."""
    runs = talk.runs
    for place, (before, run) in enumerate(pairwise(runs), 1):
        shared = run.num_shared(runs[:place])
        assert shared > len(before.prompt) - len(OPENING)
        is_whole = shared == len(before.tokens) - 1
        assert shared - run.num_cached < BLOCK + (0 if is_whole else len("\n assistant\n"))
    assert sum(run.num_shared(runs[:place]) > len(runs[place - 1].tokens) - 2 for place, run in enumerate(runs)) > 8


def test_a_killed_server_goes_on_with_what_an_agent_sends_next(talk: Talk, tmp_path: Path) -> None:
    """The recorded requests, sent anew to a server that is killed twice. Its own answers are a token of random weights,
    so the recorded ones, which the next request brings, are new to it.
    """
    options = ("--cache-dir", tmp_path / "cache", "--max-running", "2", "--alias", NAME)
    for start, end in pairwise((0, *KILLED_BEFORE, NUM_TURNS + 1)):
        with serving(talk.model, *options) as served:
            url = served.wait_ready()
            for place in range(start, end):
                path, body = talk.requests[place]
                limit = "max_tokens" if "max_tokens" in body else "max_output_tokens"
                sent = {**body, "stream": False, limit: 1}
                response = httpx.post(f"{url}{path}", json=sent, timeout=HANG_S)
                assert response.status_code == 200, response.text
                prompt, cached, _ = COUNTS[path](response.json())
                assert prompt == len(talk.runs[place].prompt)
                if place:
                    shared = num_common(talk.runs[place - 1].prompt, talk.runs[place].prompt)
                    assert shared - FILE_BLOCK - len(OPENING) < cached <= shared, place
            wait_saved(tmp_path / "cache")
            kill(served)

"""`realizar launch`: what agents are started with, and the servers that they talk to. The agents are scripts here."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from realizar.cli.server_records import announced, running_servers, servers_folder
from waits import HANG_S

AGENT = f"""#!{sys.executable}
import json, os, sys, time, urllib.request
names = ("ANTHROPIC_", "CLAUDE_", "OPENAI_", "OPENCODE_", "REALIZAR_")
found = {{name: value for name, value in os.environ.items() if name.startswith(names)}}
record = {{"arguments": sys.argv[1:], "variables": found}}
if os.environ.get("ASKS"):
    with urllib.request.urlopen(found["ANTHROPIC_BASE_URL"] + "/v1/models") as answer:
        record["models"] = [each["id"] for each in json.load(answer)["data"]]
with open(os.environ["WRITES"], "w") as file:
    json.dump(record, file)
while os.environ.get("STAYS"):
    time.sleep(0.1)
sys.exit(3)
"""
MODELS = [{"id": "m-1", "max_model_len": 32768}, {"id": 'odd "one"', "max_model_len": None}]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": MODELS}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that an agent writes; each is on the path, and no server is known."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("claude", "codex", "opencode", "aider"):
        (folder / name).write_text(AGENT)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("WRITES", str(tmp_path / "written.json"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    return tmp_path / "written.json"


def launched(realizar: Callable[..., Any], written: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    result = realizar("launch", *words)
    assert result.status == 3, result.stderr
    record = json.loads(written.read_text())
    return record["arguments"], record["variables"]


def test_claude_code(realizar: Callable[..., Any], agents: Path, url: str) -> None:
    arguments, variables = launched(realizar, agents, "claude", "--url", f"{url}/", "--", "-p", "two words")
    assert arguments == ["-p", "two words"]
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_AUTH_TOKEN"]) == (url, "none")
    assert {value for name, value in variables.items() if "MODEL" in name} == {"m-1"}
    assert "ANTHROPIC_API_KEY" not in variables


def test_codex(realizar: Callable[..., Any], agents: Path, url: str) -> None:
    words = ("codex", "--url", url, "--model", 'odd "one"', "--api-key", "secret", "--", "exec", "hi")
    arguments, variables = launched(realizar, agents, *words)
    settings = dict(word.split("=", 1) for word in arguments[1:-2:2])
    assert (arguments[:-2:2], arguments[-2:]) == (["-c"] * len(settings), ["exec", "hi"])
    assert settings["model"] == '"odd \\"one\\""'
    assert settings["model_providers.realizar.base_url"] == f'"{url}/v1"'
    assert "model_context_window" not in settings, "the server did not say"
    assert variables[json.loads(settings["model_providers.realizar.env_key"])] == "secret"
    arguments, _ = launched(realizar, agents, "codex", "--url", url)
    assert "model_context_window=32768" in arguments


def test_opencode_and_aider(realizar: Callable[..., Any], agents: Path, url: str) -> None:
    _, variables = launched(realizar, agents, "opencode", "--url", url)
    config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    assert config["provider"][provider]["options"] == {"baseURL": f"{url}/v1", "apiKey": "none"}
    assert config["provider"][provider]["models"][model]["limit"]["context"] == 32768
    arguments, variables = launched(realizar, agents, "aider", "--url", url, "--", "--message", "hi")
    assert arguments[:2] == ["--model", "openai/m-1"]
    assert arguments[-2:] == ["--message", "hi"]
    assert variables["OPENAI_API_BASE"] == f"{url}/v1"


def test_the_server_that_was_started_last_is_taken(realizar: Callable[..., Any], agents: Path, url: str) -> None:
    with announced("http://127.0.0.1:9", ["other"]) as first, announced(url, ["m-1"]) as second:
        first.update(state="ready")
        second.update(state="ready")
        assert launched(realizar, agents, "claude")[1]["ANTHROPIC_BASE_URL"] == url
        assert launched(realizar, agents, "claude", "--model", "m-1")[1]["ANTHROPIC_MODEL"] == "m-1"
        result = realizar("launch", "claude", "--model", "other")
        assert "http://127.0.0.1:9 can't be asked for its models" in result.stderr


def test_a_short_context_is_said_before(
    realizar: Callable[..., Any], agents: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS[0], "max_model_len", 8192)
    assert (
        "m-1 takes 8192 tokens a request, and Claude Code's first prompt alone has about 20000"
        in realizar("launch", "claude", "--url", url).stderr
    )
    assert realizar("launch", "aider", "--url", url).stderr == ""


def test_what_can_not_be_launched_is_one_line(
    realizar: Callable[..., Any], agents: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        ("claude",): "no server of yours is running: name a model, by --model, to start one",
        ("claude", "--url", url, "--model", "m-2"): f"{url} has no model m-2; it has: m-1",
        ("claude", "--url", "http://127.0.0.1:9"): "can't be asked for its models",
        ("claude", "--model", "/nowhere.gguf"): "/nowhere.gguf does not exist",
        ("claude", "-hf", "/nowhere.gguf", "--", "-p", "-hf"): "/nowhere.gguf does not exist",
    }
    for words, message in cases.items():
        result = realizar("launch", *words)
        assert (result.status, result.stdout) == (1, "")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert "claude is not installed: npm install -g @anthropic-ai/claude-code" in realizar("launch", "claude").stderr


def test_a_server_is_started_for_the_agent_and_ends_with_it(
    agents: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the command is killed by -9."""
    command = [sys.executable, "-m", "realizar", "launch", "claude", "--model", str(tiny_path)]
    environment = {**os.environ, "ASKS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 3, done.stderr
    record = json.loads(agents.read_text())
    assert record["models"] == [record["variables"]["ANTHROPIC_MODEL"]]
    assert running_servers(servers_folder()) == []

    agents.unlink()
    process = subprocess.Popen(command, env={**environment, "STAYS": "1"}, stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + HANG_S
        while not agents.exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        (server,) = running_servers(servers_folder())
        agent = next(child for child in _children(process.pid) if child != server.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    os.kill(agent, signal.SIGKILL)
    while running_servers(servers_folder()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert running_servers(servers_folder()) == []


def test_why_a_server_does_not_start_is_said(realizar: Callable[..., Any], agents: Path, weights_only: Path) -> None:
    result = realizar("launch", "claude", "--model", weights_only)
    assert result.status == 1
    assert f"the server of {weights_only} ended: " in result.stderr
    assert "no_vocab" in result.error_lines[-1]


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

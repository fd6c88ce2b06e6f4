"""`realizar launch` starts a coding agent that talks to a local server, which it starts too where none runs.

Settings are in the agent's environment and arguments alone: files of the user's own stay as they are. Their sources are
the agents' documentation and runs of the versions that docs/log/first-start.md names.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from realizar.cli.options.arguments import complete_model
from realizar.cli.options.loading import fetch_model
from realizar.cli.server_records import ServerRecord, pid_namespace, running_servers, servers_folder
from realizar.cli.terminal.printable import printable
from realizar.errors import EngineDeadError, HubError, InvalidRequestError
from realizar.ipc.with_parent import end_with_parent

Client = Literal["claude", "codex", "opencode", "aider"]
_POLL_S = 0.1
_ANSWER_S = 10.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class _Served:
    """A model of a server; `context_length` of a request in tokens, 0 where it is not known yet."""

    url: str
    key: str
    model: str
    context_length: int


@dataclass(frozen=True, slots=True)
class _Launch:
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Known:
    """A client: how it is installed, the tokens that its first prompt takes, and what it is started with."""

    title: str
    install: str
    first_tokens: int
    launch: Callable[[_Served], _Launch]


def launch_command(
    client: Annotated[Client, Parameter(help="The agent to start.")],
    /,
    *arguments: Annotated[str, Parameter(help="The agent's own arguments, after `--`.", allow_leading_hyphen=True)],
    model: Annotated[
        str | None,
        Parameter(
            name=("--model", "-m"),
            completer=complete_model,
            help="The model, by path or name. Where no server of yours has it, one is started until the agent ends."
            " Default: the first model of the server that was started last.",
        ),
    ] = None,
    url: Annotated[str | None, Parameter(help="A server elsewhere, such as http://192.168.1.5:8000.")] = None,
    api_key: Annotated[
        str, Parameter(env_var="REALIZAR_API_KEY", help="A key of the server, where it asks for one.")
    ] = "none",
) -> int:
    """Start a coding agent with a local model: Claude Code, Codex, opencode or aider.

    What follows `--` is the agent's own: `realizar launch claude -- -p "What does this project do?"`. No file of yours
    is changed. The exit status is the agent's.
    """
    known = _CLIENTS[client]
    program = shutil.which(client)
    if program is None:
        raise InvalidRequestError(f"{client} is not installed: {known.install}")
    with _server(model, url) as (found_url, name):
        served = _ask(found_url, api_key, name)
        if 0 < served.context_length < known.first_tokens:
            print(
                f"realizar: {served.model} takes {served.context_length} tokens a request, and {known.title}'s first"
                f" prompt alone has about {known.first_tokens}",
                file=sys.stderr,
            )
        launch = known.launch(served)
        environment = {name: value for name, value in os.environ.items() if name not in launch.unset}
        return _run([program, *launch.arguments, *arguments], environment | launch.variables)


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run the agent in this terminal; an interrupt is the agent's to handle."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        )
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, handler)
    return 128 - status if status < 0 else status


@contextmanager
def _server(model: str | None, url: str | None) -> Iterator[tuple[str, str | None]]:
    """The address of a server that has the model, and its name there; one that was started ends with the context."""
    if url is not None:
        yield url.rstrip("/"), model
        return
    servers = [each for each in running_servers(servers_folder()) if each.state != "draining"]
    running = next((each for each in reversed(servers) if model is None or model in each.models), None)
    if running is not None:
        _wait_until_ready(partial(_still_running, running))
        yield running.url, model or running.models[0]
        return
    if model is None:
        raise InvalidRequestError("no server of yours is running: name a model, by --model, to start one", "model")
    fetch_model(model)  # with its progress, and with one line for what is wrong
    with _started(model) as record:
        yield record.url, record.models[0]


def _still_running(server: ServerRecord) -> ServerRecord:
    found = _record_of(server.pid, server.pid_namespace)
    if found is None:
        raise EngineDeadError(f"the server at {server.url} ended before it was ready")
    return found


def _record_of(pid: int, namespace: str) -> ServerRecord | None:
    found = running_servers(servers_folder())
    return next((each for each in found if (each.pid, each.pid_namespace) == (pid, namespace)), None)


def _wait_until_ready(look: Callable[[], ServerRecord | None]) -> ServerRecord:
    while True:
        record = look()
        if record is not None and record.state == "ready":
            return record
        time.sleep(_POLL_S)


@contextmanager
def _started(model: str) -> Iterator[ServerRecord]:
    """A server of a model on a free port, whose log is kept in a file for as long as it runs."""
    with tempfile.TemporaryDirectory(prefix="realizar-launch-") as folder:
        log = Path(folder) / "serve.log"
        print(f"starting a server of {printable(model)}; its log is {log}", file=sys.stderr)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "realizar", "serve", model, "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # an interrupt in the terminal is the agent's
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )

        def look() -> ServerRecord | None:
            if process.poll() is not None:
                lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise EngineDeadError(f"the server of {model} ended: {lines[-1].removeprefix('realizar: ')}")
            return _record_of(process.pid, pid_namespace())

        try:
            yield _wait_until_ready(look)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()


def _ask(url: str, key: str, name: str | None) -> _Served:
    """Look a model up in a server's list; RealizarError where it can't be asked, or has no such model."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            models = {each["id"]: each for each in json.load(answer)["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HubError(f"{url} can't be asked for its models: {error}") from error
    wanted = next(iter(models), None) if name is None else name
    if wanted is None or wanted not in models:
        raise InvalidRequestError(f"{url} has no model {name or ''}; it has: {', '.join(models) or 'none'}", "model")
    return _Served(url, key, wanted, int(models[wanted].get("max_model_len") or 0))


def _claude(served: _Served) -> _Launch:
    models = ("MODEL", "SMALL_FAST_MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,  # a key in ANTHROPIC_API_KEY would have to be approved in a dialogue
        **{f"ANTHROPIC_{name}": served.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _Launch(variables=variables, unset=("ANTHROPIC_API_KEY",))


def _codex(served: _Served) -> _Launch:
    provider = "model_providers.realizar"
    settings = {
        "model": served.model,
        "model_provider": "realizar",
        f"{provider}.name": "realizar",
        f"{provider}.base_url": f"{served.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "REALIZAR_API_KEY",
        "web_search": "disabled",
        **({"model_context_window": served.context_length} if served.context_length else {}),
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return _Launch(words, {"REALIZAR_API_KEY": served.key})


def _opencode(served: _Served) -> _Launch:
    context = served.context_length
    limit = {"limit": {"context": context, "output": context // 4}} if context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "realizar",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, **limit}},
    }
    name = f"realizar/{served.model}"
    config = {"provider": {"realizar": provider}, "model": name, "small_model": name}
    return _Launch(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(served: _Served) -> _Launch:
    variables = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key}
    return _Launch(["--model", f"openai/{served.model}", "--no-show-model-warnings"], variables)


_CLIENTS: dict[str, _Known] = {
    "claude": _Known("Claude Code", "npm install -g @anthropic-ai/claude-code", 20_000, _claude),
    "codex": _Known("Codex", "npm install -g @openai/codex", 9_000, _codex),
    "opencode": _Known("opencode", "npm install -g opencode-ai", 10_000, _opencode),
    "aider": _Known("aider", "pipx install aider-chat", 2_000, _aider),
}

"""Scripts rely on exit statuses, one message for an error, quiet pipes and a light start."""

from __future__ import annotations

import inspect
import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from realizar.cli.main import app, run_app
from realizar.errors import HubError
from waits import HANG_S

COMMANDS = tuple(name for name in app if not name.startswith("-"))


def test_every_promised_command_is_there() -> None:
    reading = {"list", "show", "inspect", "plan", "tokenize", "doctor", "completion", "ps"}
    measuring = {"score", "perplexity", "bench", "bench-serve", "profile", "trace", "tune"}
    promised = {"run", "chat", "serve", "launch", "pull", "rm"} | reading | measuring
    assert set(COMMANDS) == promised


def test_help_imports_nothing_heavy() -> None:
    """All helps in one process: the first that imports something heavy ends it with its name."""
    code = (
        "import sys; from realizar.cli.main import app, run_app\n"
        "heavy = {'numpy', 'numba', 'torch', 'tokenizers', 'jinja2', 'huggingface_hub'}\n"
        "for command in [[], *([name] for name in sys.argv[1:])]:\n"
        "    status, found = run_app(app, [*command, '--help']), heavy & set(sys.modules)\n"
        "    if not command: found |= {name for name in sys.modules if name.startswith('realizar.cli.commands.')}\n"
        "    if status or found: sys.exit(f'{command} ended with {status} and imported {found}')\n"
    )
    command = [sys.executable, "-c", code, *COMMANDS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: realizar") == 1 + len(COMMANDS)


def test_a_command_is_listed_with_its_own_words() -> None:
    """They are read from its source, and not imported."""
    functions = {name: app[name].default_command for name in COMMANDS}
    assert {name: app[name].help for name in COMMANDS if name != "completion"} == {
        name: inspect.getdoc(function) for name, function in functions.items() if name != "completion"
    }
    assert all(inspect.getdoc(function) for function in functions.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_nothing_of_switches_that_are_off(realizar: Callable[..., Any], command: str) -> None:
    text = realizar(command, "--help").stdout
    assert "[default: False]" not in text
    assert "[default: ()]" not in text


def test_help_states_defaults(realizar: Callable[..., Any]) -> None:
    words = " ".join(realizar("serve", "--help").stdout.replace("\u2502", " ").split())
    assert "port to listen on; 0 takes a free one. [default: 8000]" in words
    assert "[choices: model, openai] [default: model]" in words


@pytest.mark.parametrize(
    "arguments",
    [("nonesuch",), ("list", "--nonesuch"), ("pull",), ("bench", "m", "--threads", "two"), ("inspect", "a", "b")],
)
def test_a_wrong_command_line_is_status_2_and_one_line(
    realizar: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    result = realizar(*arguments)
    assert result.status == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("realizar: ")


MALFORMED = {
    "empty": (b"", "offset 0"),
    "bad magic": (b"GGML" + bytes(100), "offset 0"),
    "version 99": (b"GGUF" + (99).to_bytes(4, "little") + bytes(100), "offset 4"),
    "too many tensors": (b"GGUF" + (3).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") + bytes(8), "offset 8"),
}
USES = {
    "run": ("hello",),
    "chat": (),
    "show": (),
    "inspect": (),
    "tokenize": ("hello",),
    "score": ("--input", os.devnull),
    "perplexity": (os.devnull,),
    "bench": (),
}


@pytest.mark.parametrize("command", USES)
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_status_1_and_one_message(
    realizar: Callable[..., Any], tmp_path: Path, command: str, kind: str
) -> None:
    content, place = MALFORMED[kind]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    result = realizar(command, path, *USES[command])
    assert result.status == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"realizar: {path}: {place}")


@pytest.mark.parametrize("command", USES)
def test_a_missing_file_is_status_1(realizar: Callable[..., Any], tmp_path: Path, command: str) -> None:
    path = tmp_path / "nonesuch.gguf"
    result = realizar(command, path, *USES[command])
    assert (result.status, result.stderr) == (1, f"realizar: {path} does not exist\n")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--max-running", "0"),
        ("serve", "--max-queued", "-1"),
        ("serve", "--threads", "5000"),
        ("serve", "--instruction-set", "mmx"),
        ("serve", "--temp", "1000"),
        ("serve", "--chat-template", "nonesuch"),
        ("run", "hello", "--top-p", "3"),
        ("run", "hello", "--threads", "0"),
        ("chat", "--instruction-set", "mmx"),
        ("chat", "--max-tokens", "0"),
        ("bench", "--threads", "0"),
        ("bench", "--gen-tokens", "0"),
        ("profile", "--threads", "0"),
        ("perplexity", "text", "--window", "0"),
        ("score", "--top-logprobs", "-1"),
        ("plan", "--max-running", "0"),
    ],
)
def test_wrong_numbers_are_refused_before_a_model_is_looked_for(
    realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("realizar.hub.pull.resolve", lambda *_, **__: pytest.fail("the model was looked for"))
    result = realizar(words[0], "smollm2:135m", *words[1:])
    assert (result.status, result.stdout) == (1, "")
    assert len(result.error_lines) == 1
    assert words[-2].lstrip("-").replace("-", "_")[:4] in result.error_lines[0].replace("-", "_")


def test_a_wrong_option_of_serve_is_refused_before_the_server_is_imported() -> None:
    code = (
        "import sys; from realizar.cli.main import app, run_app;"
        "status = run_app(app, ['serve', 'smollm2:135m', '--max-running', '0']);"
        'sys.exit(f\'{status} {set(sys.modules) & {"starlette", "uvicorn", "numpy"}}\')'
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert result.stderr.splitlines() == ["realizar: max_running must be between 1 and 65536, not 0", "1 set()"]


def raising(error: BaseException) -> App:
    application = App(result_action="return_value", suppress_keyboard_interrupt=False)

    @application.default
    def command() -> None:
        raise error

    return application


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (HubError("two\nlines"), 1, "realizar: two lines\n"),
        (
            FileNotFoundError(2, "No such file or directory", "in.jsonl"),
            1,
            "realizar: in.jsonl: No such file or directory\n",
        ),
        (OSError(28, "No space left on device"), 1, "realizar: No space left on device\n"),
        (MemoryError(), 1, "realizar: out of memory\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_become_statuses(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, message: str
) -> None:
    assert run_app(raising(error), []) == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "error", [SystemError("error return without exception set"), RuntimeError("can't start new thread"), MemoryError()]
)
def test_a_limit_on_addresses_is_reported(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the limit; without a limit, such an error is a bug and has a traceback."""
    monkeypatch.setattr("resource.getrlimit", lambda _which: (700_000_000, 700_000_000))
    assert run_app(raising(error), []) == 1
    assert "ulimit -v allows this process 700.0 MB of address space" in capsys.readouterr().err
    monkeypatch.setattr("resource.getrlimit", lambda _which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not isinstance(error, MemoryError):
        with pytest.raises(type(error)):
            run_app(raising(error), [])


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_app(raising(ZeroDivisionError()), [])


def test_a_closed_pipe_ends_it_quietly(weights_only: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "realizar", "inspect", str(weights_only)]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, timeout=HANG_S, check=False)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, b"")


def test_pull_prints_the_path_last(realizar: Callable[..., Any], weights_only: Path) -> None:
    assert realizar("pull", weights_only).stdout.splitlines()[-1] == str(weights_only)
    record = json.loads(realizar("pull", weights_only, "--json").stdout)
    assert record == {"name": str(weights_only), "path": str(weights_only)}


def test_list_names_the_two_small_models(realizar: Callable[..., Any]) -> None:
    models = json.loads(realizar("list", "--json").stdout)["models"]
    assert {"smollm2:135m", "gemma3:270m"} <= {model["name"] for model in models}
    assert "gemma3:270m" in realizar("list").stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault(vocabulary_only: Path, closed: str) -> None:
    command = f'exec "{sys.executable}" -m realizar tokenize "{vocabulary_only}" he {closed}'
    result = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ("" if ">&-" in closed.split() else "256\n")


def test_words_without_quotes_are_explained(realizar: Callable[..., Any]) -> None:
    result = realizar("run", "m", "Why", "is", "it", "blue?")
    assert (result.status, "too many arguments: is it blue? (" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(("run", "m", "--tempera", "1"), "run "), (("pull",), "pull "), (("frobnicate",), "")],
)
def test_a_wrong_command_line_names_the_help_of_its_command(
    realizar: Callable[..., Any], arguments: tuple[str, ...], command: str
) -> None:
    assert realizar(*arguments).stderr.endswith(f"(see realizar {command}--help)\n")


def test_what_is_no_number_is_shown(realizar: Callable[..., Any]) -> None:
    assert "--top-k: 1.5 is not a whole number (" in realizar("run", "m", "hello", "--top-k", "1.5").stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused(realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for words in ((), (text,)):
        assert realizar("run", "nonesuch.gguf", *words).stderr == "realizar: the prompt is empty\n"


def test_a_prompt_that_is_not_utf8_is_named(realizar: Callable[..., Any]) -> None:
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert realizar("run", "nonesuch.gguf", text).stderr == "realizar: the prompt is not UTF-8 at character 3\n"


class Terminal(io.StringIO):
    """A terminal with lines typed already."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_reads_what_is_awaited(realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("hello"))
    assert "Ctrl-D" in realizar("run", "nonesuch.gguf").stderr.splitlines()[0]

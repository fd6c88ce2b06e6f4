"""Nothing that a model file, a model or a path says steers the terminal: reports, errors, answers, progress."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.cli.commands.run import show
from realizar.cli.main import app, run_app
from realizar.cli.terminal.printable import PrintableFormatter, error_line, json_line, printable, shown_answer
from realizar.cli.terminal.progress import download_progress

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model whose every text holds escapes."""
    path = tmp_path / f"model{EVIL[:8]}.gguf"
    metadata: dict[str, Any] = {
        "general.architecture": "llama" + EVIL,
        "general.name": EVIL,
        EVIL: [EVIL, EVIL],
        "tokenizer.chat_template": EVIL + "\n" + EVIL,
    }
    write_gguf(path, metadata, [NewTensor("t" + EVIL, GGMLType.F32, (4,), np.ones(4, np.float32))])
    return path


def only_text(output: str) -> bool:
    return all(line.isprintable() for line in output.split("\n"))


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["run", "-q"], ["tokenize"], ["plan"]])
def test_reports_and_errors(hostile: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["hello"] if arguments[0] in ("run", "tokenize") else []
    status = run_app(app, [arguments[0], str(hostile), *texts, *arguments[1:]])
    captured = capsys.readouterr()
    assert status == (0 if arguments[0] == "inspect" else 1)
    assert only_text(captured.out)
    assert only_text(captured.err)
    assert "1b]0;owne.gguf" in captured.out + captured.err, "escaped, and shown"
    if arguments == ["inspect", "--json"]:
        assert json.loads(captured.out)["metadata"]["general.name"] == EVIL


def test_one_line_of_an_error_is_short_and_printable() -> None:
    assert error_line(ValueError(f"a\n b {EVIL}")) == f"a b {printable(EVIL.rstrip(chr(13) + chr(0x202E)))} \\u202e"
    assert len(error_line("x" * 100_000)) < 5000
    assert error_line(ValueError()) == "ValueError"


def test_log_lines_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        logging.getLogger("x").warning("tensor %s\nand a line more", EVIL)
    line = PrintableFormatter("%(levelname)s %(message)s").format(caplog.records[0])
    assert line.startswith("WARNING tensor \\x1b]0;owned")
    assert line.endswith("\nand a line more")
    assert not set("\x1b\x9b\r") & set(line)


def test_warnings_of_a_command_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    """The command sets up no log, so that Python's last resort shows the warnings."""
    application = App(result_action="return_value")

    @application.default
    def command() -> None:
        logger = logging.getLogger("alone")
        logger.propagate = False
        logger.warning("a tensor called %s", EVIL)

    assert run_app(application, []) == 0
    assert capsys.readouterr().err.startswith("realizar: a tensor called \\x1b]0;owned")


def test_json_keeps_letters_and_values() -> None:
    value = {"é日": [EVIL, 1.5, "\U000e0001"]}
    line = json_line(value)
    assert "é日" in line
    assert line.isprintable()
    assert json.loads(line) == value


@pytest.mark.parametrize("terminal", [True, False])
def test_a_models_words(terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined emoji and line breaks stay; a pipe gets what the model said, unchanged."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    words = f"a\tb\n👩\u200d💻{EVIL}"
    show(iter([words]))
    shown = capsys.readouterr().out
    if not terminal:
        assert shown == words + "\n"
        return
    assert shown.startswith("a\tb\n👩\u200d💻\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r")
    assert shown_answer("plain") == "plain"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_of_fetched_files(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with download_progress() as progress:
        progress(f"[/red]{EVIL}", 1, 2)
        progress(f"[/red]{EVIL}", 2, 2)
    shown = capsys.readouterr().err
    assert "[/red]\\x1b]0;owned" in shown.replace("\n", "")
    assert "\x1b]0;owned" not in shown

"""The prompt of `realizar run` comes from arguments, a file or stdin."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from realizar.cli.commands.run import read_prompt
from realizar.errors import InvalidRequestError


@pytest.fixture
def stdin_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | Path], None]]:
    """Call it with the file that stdin is to read."""
    with ExitStack() as opened:

        def replace(path: str | Path) -> None:
            file = Path(path).open(encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
            monkeypatch.setattr("sys.stdin", opened.enter_context(file))

        yield replace


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Grüße.\n")
    return path


def test_what_is_piped_in_is_appended(stdin_from: Callable[[str | Path], None], text: Path) -> None:
    stdin_from(text)
    assert read_prompt("Summarise", None) == "Summarise\n\nGrüße.\n"


def test_a_pipe_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"a file")
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        assert read_prompt("Summarise", None) == "Summarise\n\na file"


@pytest.mark.parametrize("stdin", [os.devnull, None])
def test_an_empty_or_closed_stdin_adds_nothing(
    monkeypatch: pytest.MonkeyPatch, stdin_from: Callable[[str | Path], None], stdin: str | None
) -> None:
    if stdin is None:
        monkeypatch.setattr("sys.stdin", io.StringIO("a stdin that is no file, as in a notebook"))
    else:
        stdin_from(stdin)
    assert read_prompt("Summarise", None) == "Summarise"


@pytest.mark.parametrize(("words", "file"), [(None, None), ("-", None), (None, Path("-"))])
def test_stdin_alone_is_the_prompt(
    stdin_from: Callable[[str | Path], None], text: Path, words: str | None, file: Path | None
) -> None:
    stdin_from(text)
    assert read_prompt(words, file) == "Grüße.\n"


def test_a_file_goes_before_stdin(stdin_from: Callable[[str | Path], None], tmp_path: Path, text: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("not read")
    stdin_from(other)
    assert read_prompt(None, text) == "Grüße.\n"
    assert read_prompt("Summarise", text) == "Summarise\n\nGrüße.\n"
    assert read_prompt("Summarise", Path("-")) == "Summarise\n\nnot read"


def test_what_is_no_text_is_refused(stdin_from: Callable[[str | Path], None], tmp_path: Path, text: Path) -> None:
    broken = tmp_path / "broken.bin"
    broken.write_bytes(b"abc\xff")
    with pytest.raises(InvalidRequestError, match=r"broken\.bin is not UTF-8 at byte 3"):
        read_prompt(None, broken)
    with pytest.raises(InvalidRequestError, match="nonesuch: No such file"):
        read_prompt(None, tmp_path / "nonesuch")
    with pytest.raises(InvalidRequestError, match="can't be combined"):
        read_prompt("-", text)
    stdin_from(broken)
    with pytest.raises(InvalidRequestError, match="not UTF-8 at character 3"):
        read_prompt("Summarise", None)


def test_endless_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.cli.commands.run._MOST_CHARACTERS", 1 << 20)
    with pytest.raises(InvalidRequestError, match="/dev/zero has more than 1 million characters"):
        read_prompt(None, Path("/dev/zero"))


def test_the_whole_command(
    realizar: Callable[..., Any], stdin_from: Callable[[str | Path], None], tiny_path: Path, text: Path
) -> None:
    words = ("run", tiny_path, "--raw", "--json", "-n", "1")
    stdin_from(text)
    piped = realizar(*words, "Say")
    assert piped.status == 0, piped.stderr
    assert json.loads(piped.stdout)["prompt_tokens"] == list("Say\n\nGrüße.\n".encode())
    stdin_from(os.devnull)
    named = realizar(*words, "-f", text)
    assert named.status == 0, named.stderr
    assert json.loads(named.stdout)["prompt_tokens"] == list("Grüße.\n".encode())

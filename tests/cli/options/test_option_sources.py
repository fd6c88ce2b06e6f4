"""Options of `serve` from the command line, from variables and from a file: their order, forms and refusals."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclopts import Token

from realizar.cli.main import app
from realizar.cli.options.sources import OptionSources


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REALIZAR_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def shown(realizar: Callable[..., Any]) -> Callable[..., dict[str, tuple[Any, str]]]:
    """Call it with words of a command line: the value of each option that has one, and where it is from."""

    def call(*words: str | Path) -> dict[str, tuple[Any, str]]:
        result = realizar("serve", *words, "--print-config")
        assert result.status == 0, result.stderr
        values = tomllib.loads(result.stdout)
        labels = dict(line.rsplit("  # ", 1) for line in result.stdout.splitlines() if not line.startswith("#"))
        return {name.partition(" = ")[0]: (values[name.partition(" = ")[0]], of) for name, of in labels.items()}

    return call


def test_every_option_has_a_variable_and_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.toml"
    every = app["serve"].assemble_argument_collection()
    names = {argument.name for argument in every if not argument.children} - {"--config", "--print-config"}
    assert len(names) > 50
    for name in names:
        text = "true" if every[name].token_count()[0] == 0 else "a text"
        key = name.lstrip("-").lower()
        variable = f"REALIZAR_{key.upper().replace('-', '_')}"
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            arguments = every.copy(reset_tokens=True)
            OptionSources()(app["serve"], ("serve",), arguments)
        assert {each.name: each.tokens[0].source for each in arguments if each.tokens} == {name: variable}
        assert arguments[name].tokens[0].value == text
        file.write_text(f"{key} = {text if text == 'true' else repr(text)}")
        arguments = every.copy(reset_tokens=True)
        arguments["--config"].append(Token(value=str(file), source="cli"))
        OptionSources()(app["serve"], ("serve",), arguments)
        assert [token.value for token in arguments[name].tokens] == [text]
        assert arguments[name].tokens[0].source == f"{file}: {key}"


def test_the_command_line_comes_before_variables_and_these_before_the_file(
    shown: Callable[..., dict[str, tuple[Any, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        "model = 'of-file'\nport = 1\nmax-running = 1\nmax_queued = 1\nno-web-page = true\nstop = ['a', 'b']\n"
    )
    monkeypatch.setenv("REALIZAR_CONFIG", str(file))
    monkeypatch.setenv("REALIZAR_PORT", "2")
    monkeypatch.setenv("REALIZAR_MAX_NUM_SEQS", "2")  # another name of --max-running
    monkeypatch.setenv("REALIZAR_NO_WEB_PAGE", "off")
    monkeypatch.setenv("REALIZAR_MAX_QUEUED", "")  # an empty variable counts as none
    found = shown("--port", "3", "--stop", "c")
    assert found["port"] == (3, "--port")
    assert found["max-running"] == (2, "REALIZAR_MAX_NUM_SEQS")
    assert found["max-queued"] == (1, f"{file}: max_queued")
    assert found["no-web-page"] == (False, "REALIZAR_NO_WEB_PAGE")
    assert found["model"] == (["of-file"], f"{file}: model")
    assert found["stop"] == (["c"], "--stop")
    assert found["host"] == ("127.0.0.1", "default")


def test_the_named_file_comes_before_that_of_the_variable(
    shown: Callable[..., dict[str, tuple[Any, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named.toml").write_text("port = 1")
    monkeypatch.setenv("REALIZAR_CONFIG", str(tmp_path / "absent.toml"))
    assert shown("m", "--config", tmp_path / "named.toml")["port"][0] == 1


def test_repeated_values_of_a_variable(
    shown: Callable[..., dict[str, tuple[Any, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALIZAR_ALLOWED_HOST", "a.example, b.example,[::1]")
    monkeypatch.setenv("REALIZAR_STOP", '["a, b", "\\n"]')
    found = shown("m")
    assert found["allowed-host"][0] == ["a.example", "b.example", "[::1]"]
    assert found["stop"][0] == ["a, b", "\n"]


def test_what_is_shown_is_a_file_of_the_same_options(
    realizar: Callable[..., Any], shown: Callable[..., dict[str, tuple[Any, str]]], tmp_path: Path
) -> None:
    words = ("m", "--stop", 'a"\\\n\x7fé', "--kv-cache-bytes", "2G", "--temp", "0.25", "--no-web-page", "--seed", "-1")
    (tmp_path / "shown.toml").write_text(realizar("serve", *words, "--print-config").stdout)
    first, again = shown(*words), shown("--config", tmp_path / "shown.toml")
    assert {name: value for name, (value, _) in first.items()} == {name: value for name, (value, _) in again.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 3", "prot names no option of serve; did you mean port?"),
        ("[server]\nport = 1", "[server] is a table, but options stand at the top of the file"),
        ("port = [1]", "port takes one value, not an array"),
        ("port = true", "port must be a text or a number, not true"),
        ("port = 1979-05-27", 'port must be a text or a number, not "1979-05-27"'),
        ("port = 1.5", "port: 1.5 is not a whole number"),
        ("no-web-page = 'yes'", "no-web-page must be true or false, not 'yes'"),
        ("no-web-page = 1", "no-web-page must be true or false, not 1"),
        ("port = 1\nport = 2", "is not valid TOML: Cannot overwrite a value"),
        ("max-running = 1\nmax_running = 2", "are names of the same option"),
        ("ctx-size = 1\ncontext-length = 2", "are names of the same option"),
        ("config = 'other.toml'", "a configuration file can't name another one"),
        ("print-config = true", "print-config names no option of serve"),
        ("port =", "is not valid TOML"),
        ("stop = " + "[" * 100_000, "is nested too deeply"),
        ("stop = [['a']]", 'stop must be a text or a number, not ["a"]'),
        ("x" * (2 << 20), "is larger than the"),
        ("temperature = -1", "temperature must be"),
        ('model = "a"\napi-key-file = "keys\\u0000"', "api-key-file must not have the character U+0000"),
    ],
    ids=range(19),
)
def test_what_a_file_may_not_hold(realizar: Callable[..., Any], tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    result = realizar("serve", "m", "--config", file, "--print-config")
    assert result.status in (1, 2)
    assert message in " ".join(result.error_lines)
    assert len(result.stderr.splitlines()) == 1


def test_files_that_can_not_be_read(realizar: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    for file, message in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        assert f"--config can't read {file}: {message}" in realizar("serve", "m", "--config", file).stderr
    assert "is not UTF-8 at byte 9" in realizar("serve", "m", "--config", tmp_path / "latin.toml").stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("REALIZAR_PROT", "1", "REALIZAR_PROT names no option of serve; did you mean REALIZAR_PORT?"),
        ("REALIZAR_PORT", "x", "Invalid value for REALIZAR_PORT: x is not a whole number"),
        ("REALIZAR_PORT", "tcp://10.0.0.1:80", "set enableServiceLinks: false"),
        ("REALIZAR_SERVICE_PORT_HTTP", "80", "set enableServiceLinks: false"),
        ("REALIZAR_NO_WEB_PAGE", "maybe", "REALIZAR_NO_WEB_PAGE must be true or false, not 'maybe'"),
        ("REALIZAR_STOP", '["a"', "REALIZAR_STOP is no array of TOML"),
        ("REALIZAR_PRINT_CONFIG", "1", "REALIZAR_PRINT_CONFIG names no option of serve"),
        ("REALIZAR_LOG_LEVEL", "loud", "Invalid value"),
    ],
)
def test_variables_that_are_refused(
    realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = realizar("serve", "m", "--print-config")
    assert result.status in (1, 2)
    assert message in result.stderr


def test_other_commands_read_no_variable(realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALIZAR_PROT", "1")
    monkeypatch.setenv("REALIZAR_MODEL", "other")
    assert realizar("list").status == 0
    assert realizar("serve", "--help").status == 0

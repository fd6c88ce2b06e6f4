"""Models without a chat template: said before anything slow is done; and templates of files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.hub.pull import BUILTIN_MODELS
from realizar.tokenizer.templates.stored_templates import stored_templates

BASE_MODEL = "gemma3:270m"


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights is a failure of the test."""

    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("realizar.engine.llm.LLM.__init__", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("words", [("run", BASE_MODEL, "hello"), ("chat", BASE_MODEL)])
def test_a_known_base_model_is_not_even_fetched(
    realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = realizar(*words)
    assert result.status == 1
    assert result.stderr.startswith(f"realizar: {BASE_MODEL} has no chat template")
    assert "--raw" in result.stderr
    assert "--chat-template FILE" in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("nothing_loads")
def test_a_file_without_template_is_not_loaded(
    realizar: Callable[..., Any], weights_only: Path, vocabulary_only: Path
) -> None:
    for path in (weights_only, vocabulary_only):
        result = realizar("run", path, "hello")
        assert (result.status, len(result.stderr.splitlines())) == (1, 1)
        assert f"{path} has no chat template" in result.stderr


def test_the_table_says_what_the_files_hold(smollm2_path: Path, gemma3_path: Path) -> None:
    for name, path in (("smollm2:135m", smollm2_path), (BASE_MODEL, gemma3_path)):
        assert BUILTIN_MODELS[name].has_chat_template == bool(stored_templates(open_checkpoint(path)))


def test_list_and_inspect_say_so(realizar: Callable[..., Any], weights_only: Path, smollm2_path: Path) -> None:
    lines = {line.split()[0]: line for line in realizar("list").stdout.splitlines()}
    assert "base model" in lines[BASE_MODEL]
    assert "base model" not in lines["smollm2:135m"]
    models = {model["name"]: model for model in json.loads(realizar("list", "--json").stdout)["models"]}
    assert (models[BASE_MODEL]["chat_template"], models["smollm2:135m"]["chat_template"]) == (False, True)
    found = [line for line in realizar("inspect", weights_only).stdout.splitlines() if line.startswith("chat")]
    assert len(found) == 1
    assert "run --raw" in found[0]
    assert "chat          yes, with the template below" in realizar("inspect", smollm2_path).stdout


@pytest.mark.parametrize("name", ["--chat-template", "--chat-template-file"])
def test_a_template_of_a_file_is_used(realizar: Callable[..., Any], tmp_path: Path, tiny_path: Path, name: str) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("<{{ messages[-1].content }}>")
    record = json.loads(realizar("run", tiny_path, "hi", name, file, "--json", "-n", "1").stdout)
    assert record["prompt_tokens"] == list(b"<hi>")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "chatml: No such file"),
        (b"{% if", "malformed"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"x" * 60_000, "49152"),
    ],
)
def test_a_template_that_can_not_be_used_is_refused_first(
    realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: bytes | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        Path("chatml").write_bytes(source)
    for words in (("run", "smollm2:135m", "hi"), ("chat", "smollm2:135m")):
        result = realizar(*words, "--chat-template", "chatml")
        assert (result.status, len(result.stderr.splitlines())) == (1, 1)
        assert "chatml" in result.stderr
        assert message in result.stderr
    raw = realizar("run", "smollm2:135m", "hi", "--raw", "--chat-template", "chatml")
    assert "which --raw does not use" in raw.stderr

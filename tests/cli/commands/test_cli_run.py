"""`realizar run`, `chat`, `score` and `perplexity` with real models."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.vision_kinds import IMAGE
from images.vision_models import image_of, write_vision_files
from realizar.cli.main import _with_model_first

RAW = ("--raw", "--temperature", "0", "--max-tokens", "6")


def test_raw_completion_goes_to_stdout_and_statistics_to_stderr(
    realizar: Callable[..., Any], smollm2_path: Path
) -> None:
    result = realizar("run", smollm2_path, "The capital of France is", *RAW)
    assert result.status == 0, result.stderr
    assert result.stdout.startswith(" Paris")
    assert "tok/s" not in result.stdout
    assert re.search(r"^6 tokens at \d+\.\d tok/s \(prompt: 5 tokens at ", result.stderr, re.MULTILINE)


def test_json_holds_the_same_answer(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    text = realizar("run", smollm2_path, "The capital of France is", *RAW, "--quiet").stdout
    as_elsewhere = ("-p", "The capital of France is", "-m", smollm2_path)
    record = json.loads(realizar("run", *as_elsewhere, *RAW, "--json").stdout)
    assert record["text"].rstrip("\n") == text.rstrip("\n")
    assert len(record["tokens"]) == 6
    assert record["finish_reason"] == "length"
    ids = json.loads(realizar("tokenize", smollm2_path, "The capital of France is", "--json").stdout)["tokens"]
    assert record["prompt_tokens"] == ids


@pytest.mark.parametrize("words", [("m.gguf", "hi", "-m", "other.gguf"), ("m.gguf", "--system", "-m", "hi")])
def test_a_model_after_others_is_no_first_argument(words: tuple[str, ...]) -> None:
    assert _with_model_first(["run", *words]) == ["run", *words]


def test_a_chat_answer_goes_through_the_template(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    words = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "4", "--json")
    record = json.loads(realizar("run", smollm2_path, "Hi", *words).stdout)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert record["prompt_tokens"] == json.loads(realizar("tokenize", smollm2_path, prompt, "--json").stdout)["tokens"]


def test_the_same_seed_gives_the_same_text(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    def text(seed: str) -> str:
        words = ("--raw", "--seed", seed, "--temperature", "1.5", "--max-tokens", "12", "--quiet")
        return str(realizar("run", smollm2_path, "Once upon a time", *words).stdout)

    assert text("5") == text("5")
    assert text("5") != text("6")


def test_the_prompt_can_come_from_stdin(
    realizar: Callable[..., Any], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is"))
    assert realizar("run", smollm2_path, *RAW, "--quiet").stdout.startswith(" Paris")


def test_a_system_message_needs_a_template(realizar: Callable[..., Any], gemma3_path: Path) -> None:
    assert realizar("run", gemma3_path, "hello", "--raw", "--system", "x").status == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top-p", "2"), "top_p"),
        (("--context-length", "4"), "4"),
        (("--context-length", "99999"), "8192"),
        (("--threads", "0"), "threads"),
    ],
)
def test_impossible_requests_are_one_line(
    realizar: Callable[..., Any], smollm2_path: Path, words: tuple[str, str], message: str
) -> None:
    result = realizar("run", smollm2_path, "The capital of France is", *RAW, *words)
    assert (result.status, result.stdout) == (1, "")
    assert len(result.error_lines) == 1
    assert message in result.error_lines[0]


def test_a_piped_conversation_keeps_its_history(
    realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "chat.json"
    lines = ["My name is\\", "Ada.", "/nonesuch", "What is my name?", f"/save {saved}", "/quit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    result = realizar("chat", smollm2_path, "--temperature", "0", "--max-tokens", "12")
    assert result.status == 0
    assert result.error_lines == ["realizar: /nonesuch is not a command; /help lists them"]
    assert result.stderr.count("tok/s (prompt") == 2
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "My name is\nAda."
    assert messages[3]["content"] in result.stdout


def scored(realizar: Callable[..., Any], model: Path, folder: Path, lines: list[Any], top: int) -> list[dict[str, Any]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = realizar("score", model, "--input", source, "--output", target, "--top-logprobs", str(top))
    assert (result.status, result.stdout) == (0, ""), result.stderr
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_scores_are_log_probabilities_of_the_given_tokens(
    realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path
) -> None:
    text = "The capital of France is Paris."
    from_text, again = scored(realizar, smollm2_path, tmp_path, [{"text": text}, {"text": text}], 1000)
    from_tokens = scored(realizar, smollm2_path, tmp_path, [{"tokens": from_text["tokens"]}], 1000)[0]
    assert from_text == again == from_tokens
    assert set(from_text) == {"tokens", "logprobs", "top_logprobs"}
    assert from_text["logprobs"][0] is None
    assert from_text["top_logprobs"][0] is None
    for token, logprob, top in zip(
        *(from_text[key][1:] for key in ("tokens", "logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 1000
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert 0.5 < sum(math.exp(value) for value in values) <= 1 + 1e-4
        named = dict(map(tuple, top))
        assert logprob == named[token] if token in named else logprob <= values[-1]
    paris = from_text["tokens"].index(from_text["top_logprobs"][5][0][0])
    assert paris == 5  # what it would have said itself


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"tokens": [1, 49152]}, "49152"),
        ({"tokens": [-1]}, "-1"),
        ({"tokens": []}, "empty"),
        ({"tokens": [True]}, "integers"),
        ({"tokens": "1"}, "integers"),
        ({}, "text"),
    ],
)
def test_a_line_that_can_not_be_scored_is_named(
    realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path, line: Any, message: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line) + "\n")
    result = realizar("score", smollm2_path, "--input", source, "--output", tmp_path / "out.jsonl")
    assert result.status == 1
    assert result.error_lines[0].startswith(f"realizar: {source}:1: ")
    assert message in result.error_lines[0]


def test_perplexity_is_that_of_the_scores(realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path) -> None:
    text = "The cat sat on the mat, and the dog sat on the cat. " * 3
    file = tmp_path / "text.txt"
    file.write_text(text)
    scores = scored(realizar, smollm2_path, tmp_path, [{"text": text}], 0)[0]["logprobs"][1:]
    record = json.loads(realizar("perplexity", smollm2_path, file, "--json").stdout)
    assert record["tokens"] == len(scores)
    assert record["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-6)
    shorter = json.loads(realizar("perplexity", smollm2_path, file, "--json", "--window", "16").stdout)
    assert shorter["tokens"] == len(scores)
    assert shorter["perplexity"] > record["perplexity"]
    assert "perplexity" in realizar("perplexity", smollm2_path, file).stdout


def test_a_perplexity_against_that_of_another_file(
    realizar: Callable[..., Any], smollm2_path: Path, gemma3_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The capital of France is Paris.")
    record = json.loads(realizar("perplexity", smollm2_path, file, "--against", smollm2_path, "--json").stdout)
    assert record["against"] == {"perplexity": record["perplexity"], "ratio": 1, "ratio_error": 0, "same_top": 1}
    assert (
        "ratio 1.0000 +- 0.0000, the same most probable token at 100.0%\n"
        in realizar("perplexity", smollm2_path, file, "--against", smollm2_path).stdout
    )
    result = realizar("perplexity", smollm2_path, file, "--against", gemma3_path)
    assert result.status != 0
    assert f"{gemma3_path} has other tokens for this text than {smollm2_path}" in result.stderr


def test_a_text_that_is_not_utf8_has_no_perplexity(
    realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.bin"
    file.write_bytes(b"abc\xff")
    result = realizar("perplexity", smollm2_path, file)
    assert result.status == 1
    assert "not UTF-8 at byte 3" in result.error_lines[0]


def test_a_text_from_stdin_has_a_perplexity(
    realizar: Callable[..., Any], smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The cat sat on the mat, and the dog sat on the cat."
    file = tmp_path / "text.txt"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    result = realizar("perplexity", smollm2_path, "-", "--json")
    assert result.status == 0, result.stderr
    assert result.stdout == realizar("perplexity", smollm2_path, file, "--json").stdout


def test_doctor_shows_places_of_as_many_replicas_as_can_be_served(realizar: Callable[..., Any]) -> None:
    for count in ("0", "65"):
        result = realizar("doctor", "--replicas", count)
        assert result.status == 1
        assert f"--replicas must be between 1 and 64, not {count}" in result.stderr


def test_doctor_reports_and_checks(realizar: Callable[..., Any]) -> None:
    result = realizar("doctor", "--json")
    record = json.loads(result.stdout)
    assert result.status == 0, record["checks"]
    assert record["instruction_sets"][record["instruction_set"]] is True
    assert record["instruction_sets"]["portable"] is True
    assert [check["ok"] for check in record["checks"]] == [True, True, True]
    assert record["memory_bytes"] > 0


class Terminal(io.StringIO):
    """A terminal with lines typed already."""

    def isatty(self) -> bool:
        return True


def test_the_end_of_a_typed_conversation_ends_the_line(
    realizar: Callable[..., Any], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gets answers alone, and no prompt."""
    monkeypatch.setattr("sys.stdin", Terminal(""))
    result = realizar("chat", smollm2_path)
    assert (result.status, result.stdout) == (0, "")
    assert result.stderr == "> \n"


def test_images_come_before_the_prompt(realizar: Callable[..., Any], tmp_path: Path, smollm2_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
    for name, size in (("a.png", (28, 28)), ("b.jpg", (333, 777))):
        pillow.fromarray(image_of(size)).save(tmp_path / name)
    (tmp_path / "torn.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    words = (
        "What?",
        "--image",
        tmp_path / "a.png",
        "--image",
        tmp_path / "b.jpg",
        "--max-tokens",
        "2",
        "--threads",
        "1",
    )
    result = realizar("run", write_vision_files(tmp_path), *words, "--json")
    assert result.status == 0, result.stderr
    assert json.loads(result.stdout)["prompt_tokens"].count(IMAGE) == 16 * (9 + 1 + 6 + 1)
    for model, more, message in (
        (smollm2_path, (), "is an image, and the model reads text only"),
        (tmp_path / "tiny.gguf", ("--mmproj", "none"), "is an image, and the model reads text only"),
        (smollm2_path, ("--mmproj", tmp_path / "mmproj-tiny.gguf"), "whose embeddings have 576"),
        (smollm2_path, ("--raw",), "--image needs a chat template"),
        (tmp_path / "tiny.gguf", ("--image", tmp_path / "none.png"), "none.png) can't be read: No such file"),
        (tmp_path / "tiny.gguf", ("--image", tmp_path / "torn.png"), "content[2] (torn.png) is malformed"),
    ):
        result = realizar("run", model, *words, *more)
        assert (result.status, result.stdout) == (1, "")
        assert message in result.error_lines[-1]

"""`realizar show`: what it says of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.vision_models import write_vision_files
from realizar.checkpoint.gguf_writer import write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.sizes import format_bytes


def shown(realizar: Callable[..., Any], path: Path | str) -> dict[str, Any]:
    result = realizar("show", path, "--json")
    assert result.status == 0, result.stderr
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_model_is_described(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    record = shown(realizar, smollm2_path)
    assert (record["architecture"], record["context_length"], record["types"][0]) == ("llama", 8192, "Q4_1")
    assert (record["runs"], record["chat"], record["tools"], record["pooling"]) == (True, True, False, None)
    assert (record["advised_sampling"], record["sampling"]["temperature"]) == ({}, 0.8)
    text = realizar("show", smollm2_path).stdout
    assert "8,192 tokens" in text
    assert "apache-2.0" in text
    assert len(text.splitlines()) == 12
    assert record["images"] == {"encoder": None, "file": None, "reason": None, "weight_bytes": 0}


def test_models_that_see_say_by_what(realizar: Callable[..., Any], tmp_path: Path) -> None:
    """In the same words as `inspect`; an encoder that does not run says why."""
    path = write_vision_files(tmp_path)
    tower = tmp_path / "mmproj-tiny.gguf"
    size = sum(each.size_bytes for each in open_checkpoint(tower).tensors.values() if len(each.shape) > 1)
    size -= open_checkpoint(tower).tensors["v.position_embd.weight"].size_bytes
    found = {"encoder": "idefics3", "file": str(tower), "reason": None, "weight_bytes": size}
    assert shown(realizar, path)["images"] == found
    said = f"yes, encoded by idefics3 of {tower}, {format_bytes(size)} of weights"
    assert f"images        {said}\n" in realizar("inspect", path).stdout
    assert f"images        {said}\n" in realizar("show", path).stdout
    tower.write_bytes(tower.read_bytes()[:100])
    refused = shown(realizar, path)["images"]
    assert (refused["encoder"], "mmproj-tiny.gguf" in refused["reason"]) == (None, True)
    assert "images        no: " in realizar("show", path).stdout


def test_the_template_alone(realizar: Callable[..., Any], tiny_path: Path, weights_only: Path) -> None:
    record = json.loads(realizar("inspect", tiny_path, "--json").stdout)
    assert realizar("show", tiny_path, "--template").stdout == record["chat_template"] + "\n"
    refused = realizar("show", weights_only, "--template")
    assert (refused.status, refused.error_lines) == (1, [f"realizar: {weights_only} has no chat template"])
    assert "--json" in realizar("show", tiny_path, "--template", "--json").error_lines[0]


def test_abilities_and_advice_are_read(realizar: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "described.gguf"
    template = (
        "{% for tool in tools %}<tool_call>{{ tool }}{% endfor %}"
        "{% for m in messages %}<think>{{ m.content }}{% endfor %}"
    )
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "general.license": "mit\x1b[2J",
        "general.sampling.temp": 0.25,
        "llama.pooling_type": 1,
        "tokenizer.chat_template": template,
    }
    write_gguf(path, metadata)
    record = shown(realizar, path)
    assert (record["tools"], record["reasoning"], record["pooling"]) == (True, True, "mean")
    assert record["advised_sampling"] == {"temperature": 0.25}
    assert record["sampling"] == {"temperature": 0.25, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert (record["runs"], record["context_length"]) == (False, None)
    text = realizar("show", path).stdout
    assert "yes, tools, reasoning" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("content", [b"", b"GGUF"])
def test_a_malformed_file_is_one_line(realizar: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    result = realizar("show", path)
    assert (result.status, result.stdout, len(result.stderr.splitlines())) == (1, "", 1)

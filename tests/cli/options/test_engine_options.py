"""The engine's options are the same, with the same help, in every command that loads or plans a model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realizar.backends.devices import TRAITS
from realizar.cli.options.engine import BackendOptions, BatchingOptions, DraftOptions, EngineOptions
from realizar.config import QUEUED_PER_ROW, EngineConfig
from realizar.errors import InvalidRequestError

ENGINE = [
    "device", "batch-invariant", "prompt-dtype", "threads", "no-graphs", "no-device-check", "kv-cache-dtype",
    "expert-used-count", "instruction-set",
]  # fmt: skip
BATCHING = ["max-running", "max-queued", "max-step-tokens", "kv-cache-bytes", "no-prefix-cache"]
DRAFTS = ["drafter", "speculative-tokens"]
LOADED = ["context-length", "mmproj", "image-max-tokens"]
COMMANDS = {
    "bench": ENGINE, "profile": ENGINE, "trace": ENGINE,
    "run": [*ENGINE, *DRAFTS, *LOADED], "chat": [*ENGINE, *DRAFTS, *LOADED],
    "score": [*ENGINE, *LOADED], "perplexity": [*ENGINE, *LOADED],
    "plan": [*ENGINE, *BATCHING, *DRAFTS, *LOADED],
    "serve": [*ENGINE, *BATCHING, *DRAFTS, *LOADED],
}  # fmt: skip


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every command, on lines that nothing wraps."""
    from realizar.cli.main import app

    found = {}
    for command in COMMANDS:
        console = Console(width=1000, record=True, file=io.StringIO())
        app.help_print([command], console=console)
        found[command] = console.export_text()
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_options_with_the_help_of_serve(command: str, helps: dict[str, str]) -> None:
    def line(of: str, option: str) -> list[str]:
        lines = (" ".join(text.split()) for text in helps[of].splitlines())
        return [text for text in lines if text.startswith(f"│ --{option} ")]

    for option in COMMANDS[command]:
        assert line(command, option) == line("serve", option) != [], option
        assert len(line(command, option)) == 1
    for option in {"context-length", "max-running"} - set(COMMANDS[command]):
        assert not line(command, option), "the command's own work decides"


def test_every_field_of_the_options_reaches_the_configuration() -> None:
    """Every option gets a value that is not the default; an option's name may differ from its field's."""
    given: dict[str, Any] = {
        "device": "cuda:1", "batch_invariant": True, "threads": 3, "no_graphs": True, "no_device_check": True,
        "kv_cache_dtype": "int8",
        "instruction_set": "portable", "context_length": 77, "expert_used_count": 3, "mmproj": "none",
        "image_max_tokens": 4,
    }  # fmt: skip
    batching: dict[str, Any] = {
        "max_running": 5, "max_queued": 6, "max_step_tokens": 40, "kv_cache_bytes": 9, "no_prefix_cache": True,
        "host_snapshot_bytes": 8,
    }  # fmt: skip
    drafts: dict[str, Any] = {"drafter": "small", "speculative_tokens": 2}
    assert {field.name for field in fields(EngineOptions)} == {*given, "prompt_dtype", "tensor_parallel", "layers_on"}
    assert {field.name for field in fields(BatchingOptions)} == {*batching, "cache_dir", "cache_dir_bytes"}
    assert {field.name for field in fields(DraftOptions)} == {*drafts}
    config = DraftOptions(**drafts).config(BatchingOptions(**batching).config(EngineOptions(**given).config()))
    assert config == EngineConfig(
        device="cuda:1", batch_invariant=True, threads=3, graphs=False, device_check=False, kv_cache_dtype="int8",
        instruction_set="portable", context_length=77, expert_used_count=3, max_running=5, max_step_tokens=40,
        kv_cache_bytes=9, prefix_cache=False, speculative_tokens=2, host_snapshot_bytes=8, drafter="small",
        mmproj="none", image_max_tokens=4,
    )  # fmt: skip
    kept = BatchingOptions(cache_dir="folder", cache_dir_bytes=9).config(EngineConfig())
    assert kept == EngineConfig(cache_dir="folder", cache_dir_bytes=9)
    assert EngineOptions(tensor_parallel=2).config() == EngineConfig(tensor_parallel=2)
    assert EngineOptions(layers_on="cuda=2,cpu=rest").config() == EngineConfig(layers_on="cuda=2,cpu=rest")
    assert BackendOptions(prompt_dtype="fp8").config() == EngineConfig(prompt_dtype="fp8")
    assert DraftOptions().config(BatchingOptions().config(EngineOptions().config())) == EngineConfig()


def test_defaults_that_depend_on_the_device_are_those_of_the_configuration(helps: dict[str, str]) -> None:
    rows = f"default {TRAITS['cpu'].rows}, or {TRAITS['cuda'].rows} on a GPU"
    tokens = f"default {TRAITS['cpu'].step_tokens}, or {TRAITS['cuda'].step_tokens} on a GPU"
    for command in ("serve", "plan"):
        assert rows in helps[command]
        assert tokens in helps[command]
        assert f"Default {QUEUED_PER_ROW} times --max-running" in helps[command]


def test_plan_takes_what_serve_takes(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    words = ["plan", smollm2_path, "--device", "cpu", "--memory", "1G", "--json"]
    small = json.loads(realizar(*words, "--threads", "1", "-np", "3", "-b", "32", "-c", "600").stdout)
    assert [each["context_length"] for each in small["contexts"]] == [512, 600]
    assert small["workspace_bytes"] < json.loads(realizar(*words).stdout)["workspace_bytes"]
    refused = realizar(*words, "--speculative-tokens", "17")
    assert refused.status == 1
    assert "speculative_tokens must be between 0 and 16, not 17" in refused.stderr


def test_a_queue_below_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="max_queued must be at least 0, not -1"):
        BatchingOptions(max_queued=-1).config(EngineConfig())

"""`realizar plan` against what loading comes to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from images.vision_models import write_vision_files
from quantization.stored_checkpoints import Stored, write_model
from realizar.backends.select import make_tower
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.main import app, run_app
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from realizar.engine.process.planning import plan_loads
from realizar.models.generated.generate import generate_gguf
from realizar.models.towers.find import find_tower
from realizar.replicas.planning import ReplicaQuestion, divide
from tiny_model import write_tiny_model


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_app(app, ["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_sizes_are_those_of_loading(
    model: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma has two cache groups, one of them a window."""
    path = request.getfixturevalue(model)
    planned = plan(capsys, str(path), "--device", "cpu", "--context-length", "3000", "--kv-cache-bytes", "1GiB")
    assert [each["context_length"] for each in planned["contexts"]] == [512, 1024, 2048, 3000]
    longest = planned["contexts"][-1]
    config = EngineConfig(
        device="cpu", context_length=3000, max_running=1, kv_cache_bytes=1 << 30, prefix_cache=False
    )  # blocks of one request
    core = load_core(open_checkpoint(path), config)
    try:
        capacity = core.capacity
        assert planned["weight_bytes"] == capacity.weight_bytes
        assert planned["kv_dtype"] == capacity.kv_cache_dtype
        assert longest["request_bytes"] == capacity.kv_cache_bytes
    finally:
        core.close()
    assert longest["num_requests"] == (1 << 30) // longest["request_bytes"]
    counts = [each["num_requests"] for each in planned["contexts"]]
    assert counts == sorted(counts, reverse=True)


def test_each_device_with_layers_has_a_line(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["plan", str(smollm2_path), "--layers-on", "cpu=rest"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"free memory  [\d.]+ GB on all devices\ncpu +layers 0 to 29: [\d.]+ MB of weights", text)
    (own,) = plan(capsys, str(smollm2_path), "--layers-on", "cpu=rest")["of_spans"]
    assert own["weight_bytes"] == plan(capsys, str(smollm2_path), "--device", "cpu")["weight_bytes"]


def test_a_token_reads_the_chosen_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2 of 8 experts in both layers, of three matrices of 256 x 256."""
    path = tmp_path / "moe.gguf"
    generate_gguf("tiny-moe", path, GGMLType.Q8_0)
    planned = plan(capsys, str(path), "--device", "cpu")
    core = load_core(open_checkpoint(path), EngineConfig(device="cpu", max_running=1, kv_cache_bytes=1 << 24))
    try:
        assert planned["weight_bytes"] == core.capacity.weight_bytes
        assert planned["token_weight_bytes"] == core.capacity.weight_bytes_per_token
    finally:
        core.close()
    unread = 2 * 6 * 3 * 256 * 256
    assert planned["parameters"]["total"] - planned["parameters"]["active"] == unread
    assert planned["weight_bytes"] - planned["token_weight_bytes"] == unread * 34 // 32
    assert run_app(app, ["plan", str(path), "--device", "cpu"]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line == "parameters   3.8 million, 1.4 million of them for a token, which reads 1.4 MB"
    assert run_app(app, ["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "parameters    3.8 million, 1.4 million of them for a token; a token reads 1.4 MB of weights" in lines


def test_report(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(smollm2_path), "--device", "cpu", "--memory", "160M", "--max-running", "2"]
    assert run_app(app, words) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert lines[0] == "file         98.4 MB"
    assert lines[1].startswith("weights      96.4 MB packed")
    assert lines[3] == "KV cache     23.0 kB a token of f16, 64.0 MB in all", "30 layers of 3 heads of 64 in f16, twice"
    assert lines[4] == "free memory  160.0 MB"
    assert lines[7].split() == ["512", "12.5", "MB", "2", "(room", "for", "5)"]
    assert lines[-1].split() == ["8192", "189.5", "MB", "none"]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("1", "weights and workspace take 149.6 MB, and 1 B are free"),
        ("100M", "weights and workspace take 149.6 MB, and 100.0 MB are free"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_plan_by_which_nothing_runs_is_status_1(
    realizar: Callable[..., Any], smollm2_path: Path, memory: str, message: str, form: tuple[str, ...]
) -> None:
    result = realizar("plan", smollm2_path, "--device", "cpu", "--threads", "2", "--memory", memory, *form)
    assert result.status == 1
    assert result.error_lines == [f"realizar: the model does not fit: {message}"]
    assert result.stdout, "with the figures that say why"


def test_a_cache_without_room_for_a_request_is_status_1(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    words = ("--device", "cpu", "--memory", "1G", "--kv-cache-bytes", "1M")
    result = realizar("plan", smollm2_path, *words)
    assert result.status == 1
    assert "one request of 512 tokens takes 12.5 MB of KV cache, which gets 1.0 MB" in result.error_lines[0]


def test_activations_that_are_not_in_fp8_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, Stored("fp8"))
    assert run_app(app, ["plan", str(tmp_path), "--device", "cpu"]) == 0
    assert "activations  not in FP8, as the file asks for: weights alone are" in capsys.readouterr().out
    (tmp_path / "of_weights").mkdir()
    write_model(tmp_path / "of_weights", Stored("packed", symmetric=True))
    assert run_app(app, ["plan", str(tmp_path / "of_weights"), "--device", "cpu"]) == 0
    assert "activations" not in capsys.readouterr().out


def test_the_default_cache_is_for_many_usual_requests_and_few_long_ones(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache for 64 requests of the whole context would take 12 GB for a model of 98 MB."""
    planned = plan(capsys, str(smollm2_path), "--device", "cpu", "--memory", "24G")
    contexts = {each["context_length"]: each for each in planned["contexts"]}
    assert planned["kv_limit_bytes"] == 64 * contexts[1024]["request_bytes"] < 1.7e9
    few = plan(capsys, str(smollm2_path), "--device", "cpu", "--memory", "24G", "--max-running", "8")
    assert few["kv_limit_bytes"] == 4 * contexts[8192]["request_bytes"]
    one = plan(capsys, str(smollm2_path), "--device", "cpu", "--memory", "24G", "--max-running", "1")
    assert one["kv_limit_bytes"] == few["kv_limit_bytes"]  # conversations that it talks to in turn stay cached
    small = plan(capsys, str(smollm2_path), "--device", "cpu", "--memory", "1G")
    assert small["kv_limit_bytes"] == small["kv_most_bytes"] == 400_000_000


def test_a_cache_above_what_is_left_is_said(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(smollm2_path), "--device", "cpu", "--threads", "2", "--memory", "400M", "--kv-cache-bytes"]
    assert run_app(app, [*words, "300M"]) == 0
    line = capsys.readouterr().out.splitlines()[3]
    assert line.endswith(", 300.0 MB in all, and 250.4 MB are free beside the weights")
    assert run_app(app, [*words, "200M"]) == 0
    assert capsys.readouterr().out.splitlines()[3].endswith(", 200.0 MB in all")


def test_replicas_are_those_that_a_server_would_start(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "cpu", "--memory", "1G")
    found = plan(capsys, str(smollm2_path), "--replicas", "2", *words)
    planned = divide(ReplicaQuestion(str(smollm2_path), EngineConfig(device="cpu"), 2, 10**9))
    assert [each["cpus"] for each in found["replicas"]] == [[*each.place.cpus] for each in planned]
    assert [each["needed_bytes"] for each in found["replicas"]] == [each.needed_bytes for each in planned]
    assert [each["memory_bytes"] for each in found["replicas"]] == [500_000_000] * 2
    assert found["free_bytes"] == 500_000_000
    assert found["kv_limit_bytes"] == planned[0].config.kv_cache_bytes
    assert found["contexts"][-1]["context_length"] == planned[0].config.context_length == 2048
    assert "replicas" not in plan(capsys, str(smollm2_path), *words)


def test_the_report_of_replicas(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(smollm2_path), "--device", "cpu", "--memory", "1G", "--replicas", "2"]
    assert run_app(app, words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "free memory  500.0 MB for each replica"
    assert all(re.fullmatch(rf"replica {at}    .*, \d+\.\d MB of 500\.0 MB", lines[5 + at]) for at in (0, 1))
    assert lines[7] == "context      2048 tokens a request, as the model's 8192 do not fit"
    assert run_app(app, [*words, "--context-length", "1024"]) == 0
    assert "context      " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "0"), "--replicas must be between 1 and 64, not 0"),
        (("--replicas", "3", "--memory", "600M"), "with --replicas 3, the model does not fit into 200.0 MB"),
        (("--replicas", "2", "--device", "cuda:0"), "each replica has its own: use --device cuda"),
    ],
)
def test_replicas_that_can_not_be_are_refused(
    realizar: Callable[..., Any], smollm2_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = realizar("plan", smollm2_path, *(words if "--device" in words else (*words, "--device", "cpu")))
    assert result.status == 1
    assert message in result.error_lines[0]


def test_an_encoder_of_images_is_counted_as_it_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_vision_files(tmp_path)
    words = ("--device", "cpu", "--memory", "1G")
    encoder = plan(capsys, str(path), *words)["encoder"]
    found = find_tower(open_checkpoint(path))
    assert found is not None
    assert encoder["weight_bytes"] == make_tower(found[1], found[0], 1).size_bytes
    assert (encoder["name"], encoder["file"], encoder["reason"]) == ("idefics3", "mmproj-tiny.gguf", None)
    width = found[1].hidden_size + found[1].layers[0].feed_forward.up.out_features
    assert encoder["workspace_bytes"] > 4 * found[1].max_patches * width
    assert run_app(app, ["plan", str(path), *words]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("encoder")]
    assert line.endswith(" to work in and 268.4 MB for embeddings, once an image comes: idefics3 of mmproj-tiny.gguf")
    assert plan(capsys, str(path), *words, "--mmproj", "none")["encoder"] is None
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"GGUF torn")
    assert plan(capsys, str(path), *words)["encoder"] is None
    assert run_app(app, ["plan", str(path), *words]) == 0
    assert "\nencoder      none: " in capsys.readouterr().out
    assert run_app(app, ["plan", str(path), *words, "--mmproj", str(tmp_path / "mmproj-tiny.gguf")]) == 1
    assert "mmproj-tiny.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "several", "advised"), [("1G", (), False), ("1G", ("--tensor-parallel", "2"), True),
                                       ("50M", ("--tensor-parallel", "2"), False)],
)  # fmt: skip
def test_replicas_are_advised_where_one_of_several_gpus_has_room(
    memory: str, several: tuple[str, ...], advised: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    words = ["plan", str(path), "--device", "cuda", "--memory", memory, *several]
    run_app(app, words)
    assert ("\nadvice       one of the GPUs has room" in capsys.readouterr().out) == advised
    run_app(app, [*words, "--json"])
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert (advice is not None and "--replicas 2" in advice) == advised


def test_what_several_gpus_have_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    words = ["plan", str(path), "--device", "cuda", "--memory", "1G"]
    assert run_app(app, words) == 0
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert table[:1] == ["GPUs that compute the model together"]
    assert table[2].split() == ["1", "2048", "364", "-", "-", "-"], "steps of small models are not reckoned"
    assert [line.split()[:2] for line in table[3:]] == [["2", "2048"], ["4", "2048"]]
    drafted = plan(capsys, *words[1:], "--drafter", str(path), "--tensor-parallel", "1")
    planned = drafted["gpus"]
    assert planned[0]["num_requests"] == drafted["contexts"][-1]["num_requests"] < 364, "with the drafter's memory"
    assert [each["reason"] is None for each in planned] == [True, False, False]
    assert "no drafter but the text" in planned[1]["reason"]
    assert plan(capsys, str(path), "--device", "cpu")["gpus"] == []


def test_several_models_are_planned_as_a_server_of_several_does(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(write_vision_files(tmp_path)), str(smollm2_path)]
    words = ("--device", "cpu", "--memory", "2G")
    found = plan(capsys, *paths, *words)
    alone = [plan(capsys, path, *words) for path in paths]
    assert found["models"] == [{"name": path, **each} for path, each in zip(paths, alone, strict=True)]
    needed = sum(answer.checked().num_bytes for answer in plan_loads(paths, EngineConfig(device="cpu"), 2 * 10**9))
    assert found["together"] == [{"device": "cpu", "needed_bytes": needed, "memory_bytes": 2 * 10**9, "fits": True}]
    assert run_app(app, ["plan", *paths, *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"model        {paths[0]}\nfile         ")
    assert out.count("requests at once") == 2
    assert re.search(r"\ntogether     \S+ [MG]B of 2\.00 GB on cpu: all fit at once\n$", out)
    assert run_app(app, ["plan", *paths, paths[1], paths[1], *words]) == 0
    assert "on cpu: they do not fit at once, and a server loads them in turn\n" in capsys.readouterr().out


def test_memory_for_files_of_the_cache_is_planned(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(smollm2_path), "--device", "cpu", "--memory", "4G")
    assert plan(capsys, *words)["cache_files_bytes"] == 0
    assert plan(capsys, *words, "--cache-dir", str(tmp_path))["cache_files_bytes"] == 704 << 20
    assert run_app(app, ["plan", *words, "--cache-dir", str(tmp_path)]) == 0
    assert "\ncache files  up to 738.2 MB of the host's memory" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "300M"), "smollm2"),
        (("--memory", "300M", "--json"), "the model does not fit into 300.0 MB"),
        (("--replicas", "2"), "--replicas above 1 serve a single model"),
        (("--drafter", "x"), "--drafter names a model that drafts for a single one"),
        (("--mmproj", "x"), "--mmproj names an encoder of a single model's images"),
    ],
)
def test_several_models_that_can_not_be_planned(
    realizar: Callable[..., Any], tiny_path: Path, smollm2_path: Path, words: tuple[str, ...], message: str
) -> None:
    result = realizar("plan", tiny_path, smollm2_path, "--device", "cpu", *words)
    assert result.status == 1
    assert message in result.error_lines[0]
    assert ("--memory" in words) == bool(result.stdout), "figures say why"

"""`realizar plan` of models that are on a hub and not here: headers are read, and nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hub.fake_hub import Content, Endpoint, Sparse, fake_hub
from images.vision_models import write_vision_files
from quantization.stored_checkpoints import Stored, write_model, write_model_opt_file
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, gguf_header
from realizar.cli.main import app, run_app
from realizar.hub import pull, stand_in
from realizar.hub.huggingface import Listing
from realizar.hub.names import parse_name
from realizar.hub.progress import RemoteFile
from realizar.hub.stand_in import StandIn
from realizar.models.generated.generate import generated_header
from tiny_model import write_tiny_model

MOST_SENT = 32_000_000
OPTIONS = ("--device", "cpu", "--threads", "2", "--memory", "100G", "--max-running", "4", "--json")
HIDDEN, WIDTH, KEYS, VOCABULARY, LAYERS = 5120, 27648, 1024, 152064, 64
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 32768,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def gguf_files(parts: int) -> dict[str, Content]:
    """A model of 27 GB with a vocabulary of 262,144 words, whose rotation divisors are the first tensor."""
    header = generated_header("gemma4-26b-a4b")
    tensors = [
        NewTensor(each.name, GGMLType.F32 if len(each.shape) == 1 else GGMLType.Q8_0, each.shape, each.data)
        for each in header.tensors.values()
    ]
    words = {"tokenizer.ggml.tokens": [f"<a word of number {number}>" for number in range(262_144)]}
    each_part = -(-len(tensors) // parts)
    files: dict[str, Content] = {}
    for part in range(parts):
        own = tensors[part * each_part : (part + 1) * each_part]
        split = {"split.no": np.uint16(part), "split.count": np.uint16(parts)} if parts > 1 else {}
        split |= {"split.tensors.count": np.int32(len(tensors))} if parts > 1 else {}
        start = gguf_header(({**header.metadata, **words} if part == 0 else {}) | split, own)
        size = len(start) + sum(-(-tensor.size_bytes // 32) * 32 for tensor in own)
        if part == 0:
            start += header.tensors["rope_freqs.weight"].data.tobytes()
        name = "m-Q8_0.gguf" if parts == 1 else f"m-Q8_0-{part + 1:05}-of-{parts:05}.gguf"
        files[name] = Sparse(start, size)
    return files


def safetensors_files(shards: int) -> dict[str, Content]:
    """A model of 65 GB in bf16."""
    shapes = {"model.embed_tokens": [VOCABULARY, HIDDEN], "model.norm": [HIDDEN], "lm_head": [VOCABULARY, HIDDEN]}
    for layer in range(LAYERS):
        projections = {
            "self_attn.q_proj": [HIDDEN, HIDDEN],
            "self_attn.k_proj": [KEYS, HIDDEN],
            "self_attn.v_proj": [KEYS, HIDDEN],
            "self_attn.o_proj": [HIDDEN, HIDDEN],
            "mlp.gate_proj": [WIDTH, HIDDEN],
            "mlp.up_proj": [WIDTH, HIDDEN],
            "mlp.down_proj": [HIDDEN, WIDTH],
            "input_layernorm": [HIDDEN],
            "post_attention_layernorm": [HIDDEN],
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in projections.items()}
    names, files, index = list(shapes), dict[str, Content](), {}
    for shard in range(shards):
        file, entries, end = f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}, 0
        for name in names[shard::shards]:
            start, end = end, end + 2 * int(np.prod(shapes[name]))
            entries[f"{name}.weight"] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
            index[f"{name}.weight"] = file
        header = json.dumps(entries).encode()
        files[file] = Sparse(len(header).to_bytes(8, "little") + header, 8 + len(header) + end)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    return {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": bytes(40_000_000), **files}


REPOSITORIES: dict[str, dict[str, Content]] = {
    "user/one": gguf_files(1),
    "user/split": gguf_files(3),
    "user/floats": safetensors_files(14),
    "user/endless": {"m-Q4_0.gguf": Sparse(gguf_header({"general.name": "x" * 40_000_000}, []), 10**11)},
    "user/broken": {"m-Q4_0.gguf": Sparse(b"GGUF\x09", 10**10)},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Endpoint]:
    folder = tiny.parent / "seeing"
    folder.mkdir()
    write_vision_files(folder)
    seeing = {path.name: path.read_bytes() for path in folder.iterdir()}
    more = {"user/tiny": {"tiny.gguf": tiny.read_bytes()}, "user/seeing": seeing}
    with fake_hub({**REPOSITORIES, **more}) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(running: Endpoint) -> Endpoint:
    running.sent_bytes, running.gives_ranges = 0, True
    return running


def write_sparse(folder: Path, files: Mapping[str, Content]) -> None:
    """The same model on this disk, in holes."""
    for name, content in files.items():
        with (folder / name).open("wb") as stream:
            stream.write(content.start if isinstance(content, Sparse) else content)
            stream.truncate(len(content))


def planned(endpoint: Endpoint, folder: Path, name: str, *options: str) -> dict[str, Any]:
    result = endpoint.run(folder, "plan", name, *OPTIONS, *options)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def planned_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The plan of a model on this disk, for which this process does."""

    def run(model: Path, *options: str) -> dict[str, Any]:
        assert run_app(app, ["plan", str(model), *OPTIONS, *options]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.mark.parametrize(
    ("name", "least_bytes"), [("user/one:Q8_0", 26e9), ("user/split:Q8_0", 26e9), ("user/floats", 64e9)]
)
def test_a_plan_is_that_of_the_fetched_model_and_reads_little(
    tmp_path: Path, endpoint: Endpoint, name: str, least_bytes: float, planned_here: Callable[..., dict[str, Any]]
) -> None:
    remote = planned(endpoint, tmp_path, name)
    assert 0 < remote.pop("read_bytes") <= endpoint.sent_bytes < MOST_SENT
    assert not remote.pop("fetched")
    assert remote["file_bytes"] > least_bytes
    assert not list((tmp_path / "hf").rglob("*.gguf"))
    repository = name.partition(":")[0]
    write_sparse(tmp_path, REPOSITORIES[repository])
    first = next((tmp_path / file for file in REPOSITORIES[repository] if file.endswith(".gguf")), tmp_path)
    local = planned_here(first)
    assert local.pop("fetched")
    assert local.pop("read_bytes") == 0
    if first != tmp_path:
        assert local == remote
    else:  # the size of the folder has what a model does not need
        assert {**local, "file_bytes": 0} == {**remote, "file_bytes": 0}


def test_a_drafter_is_not_fetched_either(
    tmp_path: Path, endpoint: Endpoint, tiny: Path, planned_here: Callable[..., dict[str, Any]]
) -> None:
    remote = planned(endpoint, tmp_path, "user/tiny", "--drafter", "user/tiny")
    local = planned_here(tiny, "--drafter", str(tiny))
    assert remote["beside_bytes"] == local["beside_bytes"] > 0
    assert (remote["fetched"], local["fetched"]) == (False, True)
    result = endpoint.run(tmp_path, "plan", "user/floats", "--drafter", "user/tiny", "--device", "cpu")
    assert "more than 30.0 MB of it would have to be read" in result.stderr, "for the vocabulary, which is compared"


def test_an_encoder_of_images_is_planned_by_its_header(
    tmp_path: Path, endpoint: Endpoint, planned_here: Callable[..., dict[str, Any]]
) -> None:
    remote, local = planned(endpoint, tmp_path, "user/seeing"), planned_here(write_vision_files(tmp_path))
    assert remote["encoder"] == local["encoder"] is not None
    assert remote["file_bytes"] == local["file_bytes"] == (tmp_path / "tiny.gguf").stat().st_size


@pytest.mark.parametrize("stored", [Stored("gptq"), Stored("awq"), Stored("packed"), Stored("modelopt")], ids=str)
def test_values_that_a_plan_depends_on_are_read(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The order of a GPTQ model's columns, or ModelOpt's own file; small reads leave holes in a small file."""
    write_model(tmp_path, stored)
    if stored.method == "modelopt":
        write_model_opt_file(tmp_path, quant_algo="NVFP4")
    names = sorted(path.name for path in tmp_path.iterdir())
    listing = Listing(None, tuple(RemoteFile(name, (tmp_path / name).stat().st_size, 1, None) for name in names))

    def request(self: StandIn, file: str, start: int, stop: int) -> tuple[int, int]:
        data = (tmp_path / file).read_bytes()
        with (self._folder / file).open("r+b") as stream:
            stream.seek(start)
            return len(data), stream.write(data[start:stop])

    monkeypatch.setattr(stand_in, "_FIRST_BYTES", 512)
    monkeypatch.setattr(StandIn, "_request", request)
    monkeypatch.setattr(
        pull, "find_unfetched", lambda name, _room, **_: (name == "u/r" and (parse_name(name), listing)) or None
    )
    plans = []
    for name in ("u/r", str(tmp_path)):
        assert run_app(app, ["plan", name, "--device", "cpu", "--memory", "1G", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    remote, local = plans
    assert remote.pop("read_bytes") < remote["file_bytes"] - 50_000
    assert not remote.pop("fetched")
    assert {**remote, "fetched": True, "read_bytes": 0} == local


def test_the_report_says_what_was_read(tmp_path: Path, endpoint: Endpoint) -> None:
    result = endpoint.run(tmp_path, "plan", "user/floats", "--device", "cpu", "--memory", "40G")
    assert result.returncode == 1
    assert result.stdout.startswith("file         65.57 GB, not fetched: 2.0 MB of it were read\n")
    assert "does not fit" in result.stderr


@pytest.mark.parametrize(
    ("name", "gives_ranges", "message"),
    [
        ("user/one:Q8_0", False, "does not answer range requests"),
        ("user/floats", False, "does not answer range requests"),
        ("user/endless", True, "more than 30.0 MB of it would have to be read"),
        ("user/broken", True, "GGUF version 9 is not supported"),
        ("user/nonesuch", True, "does not exist on the endpoint"),
    ],
)
def test_what_can_not_be_planned_is_one_line(
    tmp_path: Path, endpoint: Endpoint, name: str, gives_ranges: bool, message: str
) -> None:
    endpoint.gives_ranges = gives_ranges
    result = endpoint.run(tmp_path, "plan", name, "--device", "cpu", "--memory", "100G")
    assert result.returncode == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert endpoint.sent_bytes < MOST_SENT

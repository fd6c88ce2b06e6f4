"""Hugging Face names, against an endpoint on this machine that answers as the real one does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.fake_hub import Endpoint, fake_hub

REPOSITORIES: dict[str, dict[str, bytes]] = {
    "user/quants": {
        "README.md": b"a card",
        "m-Q4_K_M.gguf": b"GGUF four bits" * 1000,
        "m-Q8_0-00001-of-00002.gguf": b"GGUF first part",
        "m-Q8_0-00002-of-00002.gguf": b"GGUF second part",
    },
    "user/floats": {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"pickle",
        "tokenizer.json": b"{}",
    },
    "user/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "user/private": {"m-Q4_0.gguf": b"GGUF private"},
    "user/family": {
        "m-Q4_K_M.gguf": b"GGUF four bits",
        "m-Q8_0.gguf": b"GGUF eight bits",
        "mmproj-F16.gguf": b"GGUF tower",
        "mmproj-F32.gguf": b"GGUF another tower",
        "mtp-m-Q8_0.gguf": b"GGUF drafter",
    },
}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with fake_hub(REPOSITORIES) as endpoint:
        yield endpoint


def pulled_path(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.splitlines()[-1])


def test_one_quantization_is_pulled_listed_and_found_again_offline(tmp_path: Path, endpoint: Endpoint) -> None:
    first = endpoint.run(tmp_path, "pull", "user/quants:Q4_K_M")
    path = pulled_path(first)
    assert path.read_bytes() == REPOSITORIES["user/quants"]["m-Q4_K_M.gguf"]
    assert "m-Q4_K_M.gguf" in first.stderr
    assert not any("Q8_0" in request or "README" in request for request in endpoint.requests)

    listed = json.loads(endpoint.run(tmp_path, "list", "--json").stdout)["models"]
    found = next(model for model in listed if model["name"] == "user/quants:Q4_K_M")
    assert (found["path"], found["size_bytes"], found["source"]) == (str(path), 14_000, "hugging face")

    offline = endpoint.run(tmp_path, "pull", "user/quants:Q4_K_M", HF_HUB_OFFLINE="1")
    assert pulled_path(offline) == path
    endpoint.requests.clear()
    endpoint.run(tmp_path, "inspect", "user/quants:Q4_K_M")  # resolves, then refuses the file
    assert endpoint.requests == []
    removed = endpoint.run(tmp_path, "rm", "user/quants:Q4_K_M", "--yes")
    assert (removed.returncode, removed.stdout) == (0, "removed user/quants:Q4_K_M (14.0 kB)\n")
    assert not path.exists()
    assert not any((tmp_path / "hf" / "hub").glob("models--user--quants/blobs/*"))


def test_names_are_taken_as_people_paste_them(tmp_path: Path, endpoint: Endpoint) -> None:
    path = pulled_path(endpoint.run(tmp_path, "pull", "hf.co/user/quants:q4_k_m"))
    assert path.name == "m-Q4_K_M.gguf"
    assert pulled_path(endpoint.run(tmp_path, "pull", "-hf", "user/quants:Q4_K_M")) == path
    assert pulled_path(endpoint.run(tmp_path, "pull", f"{endpoint.url}/user/quants/blob/main/m-Q4_K_M.gguf")) == path
    unnamed = endpoint.run(tmp_path, "pull", "--json", "--hf-repo=user/quants")
    assert json.loads(unnamed.stdout)["path"] == str(path)
    assert "realizar: user/quants has 2 models: Q4_K_M is taken (14.0 kB), as" in unnamed.stderr


def test_parts_of_a_split_file_lie_side_by_side(tmp_path: Path, endpoint: Endpoint) -> None:
    path = pulled_path(endpoint.run(tmp_path, "pull", "user/quants:Q8_0"))
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert path.read_bytes() == b"GGUF first part"
    assert path.with_name("m-Q8_0-00002-of-00002.gguf").read_bytes() == b"GGUF second part"


def test_a_tower_and_a_drafter_come_and_go_with_the_models_they_lie_beside(tmp_path: Path, endpoint: Endpoint) -> None:
    files = REPOSITORIES["user/family"]
    path = pulled_path(endpoint.run(tmp_path, "pull", "user/family:Q4_K_M"))
    assert path.name == "m-Q4_K_M.gguf"
    assert {each.name for each in path.parent.iterdir()} == files.keys() - {"m-Q8_0.gguf", "mmproj-F32.gguf"}
    assert path.with_name("mmproj-F16.gguf").read_bytes() == files["mmproj-F16.gguf"]
    pulled_path(endpoint.run(tmp_path, "pull", "user/family:Q8_0"))
    beside = len(files["mmproj-F16.gguf"]) + len(files["mtp-m-Q8_0.gguf"])
    listed = json.loads(endpoint.run(tmp_path, "list", "--json").stdout)["models"]
    sizes = {model["name"]: model["size_bytes"] for model in listed}
    assert sizes["user/family:Q8_0"] == len(files["m-Q8_0.gguf"]) + beside
    removed = endpoint.run(tmp_path, "rm", "user/family:Q8_0", "--yes")
    assert removed.returncode == 0
    assert {each.name for each in path.parent.iterdir()} == {"m-Q4_K_M.gguf", "mmproj-F16.gguf", "mtp-m-Q8_0.gguf"}
    path.with_name("mmproj-F16.gguf").unlink()
    endpoint.run(tmp_path, "inspect", "user/family:Q4_K_M")  # resolves, then refuses the file
    assert path.with_name("mmproj-F16.gguf").exists(), "it is fetched again"
    endpoint.run(tmp_path, "rm", "user/family:Q4_K_M", "--yes")
    assert not (tmp_path / "hf" / "hub" / "models--user--family").exists()


def test_a_tower_stays_where_none_is_wanted(tmp_path: Path, endpoint: Endpoint) -> None:
    """Of a model that `pull` or a start fetches; the next `pull` brings it."""
    path = pulled_path(endpoint.run(tmp_path, "pull", "user/family:Q4_K_M", "--mmproj", "none"))
    tower = path.with_name("mmproj-F16.gguf")
    assert path.with_name("mtp-m-Q8_0.gguf").exists()
    assert not tower.exists()
    endpoint.run(tmp_path, "run", "user/family:Q8_0", "Hi", "--mmproj", "none")  # fetches, then refuses the file
    assert path.with_name("m-Q8_0.gguf").exists()
    assert not tower.exists()
    pulled_path(endpoint.run(tmp_path, "pull", "user/family:Q4_K_M"))
    assert tower.exists()
    pulled_path(endpoint.run(tmp_path, "pull", "user/family:Q4_K_M", "--mmproj", "none"))
    endpoint.run(tmp_path, "rm", "user/family:Q8_0", "--yes")
    endpoint.run(tmp_path, "rm", "user/family:Q4_K_M", "--yes")
    assert not tower.exists(), "it is a file of the model, whatever the last `pull` wanted"


def test_safetensors_come_as_a_folder_without_pickles(tmp_path: Path, endpoint: Endpoint) -> None:
    folder = pulled_path(endpoint.run(tmp_path, "pull", "user/floats"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_private_model_needs_its_token(tmp_path: Path, endpoint: Endpoint) -> None:
    refused = endpoint.run(tmp_path, "pull", "user/private")
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
    assert pulled_path(endpoint.run(tmp_path, "pull", "user/private", HF_TOKEN="secret")).name == "m-Q4_0.gguf"


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("user/nonesuch", {}, "does not exist on the endpoint"),
        ("user/pickles", {}, "pickled"),
        ("user/quants:Q2_K", {}, "it has: Q4_K_M, Q8_0"),
        ("user/quants@../../../../etc", {}, "nor of the form"),
        ("user/..", {}, "nor of the form"),
        ("user/quants", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("user/quants", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 can't be reached"),
    ],
)
def test_what_can_not_be_fetched_is_one_line(
    tmp_path: Path, endpoint: Endpoint, name: str, variables: dict[str, str], message: str
) -> None:
    result = endpoint.run(tmp_path, "pull", name, **variables)
    assert result.returncode == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1

"""Hugging Face names, against an endpoint on this machine that answers as the real one does."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from waits import HANG_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
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
}


@dataclass
class Endpoint:
    """A running endpoint: its address, and the requests that it saw."""

    url: str
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path}")
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._answer_model("/".join(parts[2:4]))
            elif len(parts) > 4 and parts[2] == "resolve":
                self._answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self._answer(404, b"")

        do_HEAD = do_GET  # noqa: N815

        def _answer_model(self, repo: str) -> None:
            if not self._may_see(repo):
                self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
                return
            siblings = [{"rfilename": name} for name in REPOSITORIES[repo]]
            record = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self._answer(200, json.dumps(record).encode(), {"Content-Type": "application/json"})

        def _answer_file(self, repo: str, revision: str, name: str) -> None:
            content = REPOSITORIES[repo].get(name) if self._may_see(repo) and revision in ("main", COMMIT) else None
            if content is None:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"})

        def _may_see(self, repo: str) -> bool:
            private = repo == "user/private" and self.headers.get("Authorization") != "Bearer secret"
            return repo in REPOSITORIES and not private

        def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Endpoint(f"http://127.0.0.1:{server.server_port}", seen)
    server.shutdown()
    thread.join()
    server.server_close()


def realizar(tmp_path: Path, endpoint: Endpoint, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its variables when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": endpoint.url,
        "HF_HOME": str(tmp_path / "hf"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-m", "realizar", *arguments],
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=HANG_S,
        check=False,
    )


def pulled_path(result: subprocess.CompletedProcess[str]) -> Path:
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.splitlines()[-1])


def test_one_quantization_is_pulled_listed_and_found_again_offline(tmp_path: Path, endpoint: Endpoint) -> None:
    first = realizar(tmp_path, endpoint, "pull", "user/quants:Q4_K_M")
    path = pulled_path(first)
    assert path.read_bytes() == REPOSITORIES["user/quants"]["m-Q4_K_M.gguf"]
    assert "m-Q4_K_M.gguf" in first.stderr
    assert not any("Q8_0" in request or "README" in request for request in endpoint.requests)

    listed = json.loads(realizar(tmp_path, endpoint, "list", "--json").stdout)["models"]
    found = next(model for model in listed if model["name"] == "user/quants:Q4_K_M")
    assert (found["path"], found["size_bytes"], found["source"]) == (str(path), 14_000, "hugging face")

    offline = realizar(tmp_path, endpoint, "pull", "user/quants:Q4_K_M", HF_HUB_OFFLINE="1")
    assert pulled_path(offline) == path
    endpoint.requests.clear()
    realizar(tmp_path, endpoint, "inspect", "user/quants:Q4_K_M")  # resolves, then refuses the file
    assert endpoint.requests == []
    removed = realizar(tmp_path, endpoint, "rm", "user/quants:Q4_K_M", "--yes")
    assert (removed.returncode, removed.stdout) == (0, "removed user/quants:Q4_K_M (14.0 kB)\n")
    assert not path.exists()
    assert not any((tmp_path / "hf" / "hub").glob("models--user--quants/blobs/*"))


def test_parts_of_a_split_file_lie_side_by_side(tmp_path: Path, endpoint: Endpoint) -> None:
    path = pulled_path(realizar(tmp_path, endpoint, "pull", "user/quants:Q8_0"))
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert path.read_bytes() == b"GGUF first part"
    assert path.with_name("m-Q8_0-00002-of-00002.gguf").read_bytes() == b"GGUF second part"


def test_safetensors_come_as_a_folder_without_pickles(tmp_path: Path, endpoint: Endpoint) -> None:
    folder = pulled_path(realizar(tmp_path, endpoint, "pull", "user/floats"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_private_model_needs_its_token(tmp_path: Path, endpoint: Endpoint) -> None:
    refused = realizar(tmp_path, endpoint, "pull", "user/private")
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
    assert pulled_path(realizar(tmp_path, endpoint, "pull", "user/private", HF_TOKEN="secret")).name == "m-Q4_0.gguf"


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("user/nonesuch", {}, "does not exist on the endpoint"),
        ("user/pickles", {}, "pickled"),
        ("user/quants:Q2_K", {}, "it has: Q4_K_M, Q8_0"),
        ("user/quants", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("user/quants", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 can't be reached"),
    ],
)
def test_what_can_not_be_fetched_is_one_line(
    tmp_path: Path, endpoint: Endpoint, name: str, variables: dict[str, str], message: str
) -> None:
    result = realizar(tmp_path, endpoint, "pull", name, **variables)
    assert result.returncode == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1

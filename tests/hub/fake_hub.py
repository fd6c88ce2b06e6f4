"""A hub on this machine that answers as Hugging Face's does."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Endpoint:
    """A running endpoint.

    Attributes:
        url: its address.
        requests: those that it saw.
        sizes: sizes of files that it tells, where they are not true.
        held: names of files of which it sends the first half, and the rest once they are removed.
        half_sent: set when a first half is.
    """

    url: str
    requests: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    half_sent: threading.Event = field(default_factory=threading.Event)

    def variables(self, folder: Path) -> dict[str, str]:
        """Variables with which the library asks this endpoint, and caches below a folder."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}


class _Handler(http.server.BaseHTTPRequestHandler):
    endpoint: Endpoint
    repositories: Mapping[str, Mapping[str, bytes]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.endpoint.requests.append(f"{self.command} {self.path}")
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
        siblings = [_sibling(name, content, self.endpoint.sizes) for name, content in self.repositories[repo].items()]
        record = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._answer(200, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, repo: str, revision: str, name: str) -> None:
        content = self.repositories[repo].get(name) if self._may_see(repo) and revision in ("main", COMMIT) else None
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._answer(200, content, headers, held=name in self.endpoint.held and name)

    def _may_see(self, repo: str) -> bool:
        private = repo == "user/private" and self.headers.get("Authorization") != "Bearer secret"
        return repo in self.repositories and not private

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, held: str | Literal[False] = False
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(ConnectionError):
            self.wfile.write(body[: len(body) // 2])
            while held and held in self.endpoint.held:
                self.endpoint.half_sent.set()
                time.sleep(0.01)
            self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Endpoint]:
    """Answer as the hub does, with these files by their repositories."""
    endpoint = Endpoint("")

    handler = type("Handler", (_Handler,), {"endpoint": endpoint, "repositories": repositories})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield endpoint
    finally:
        endpoint.held.clear()
        server.shutdown()
        thread.join()
        server.server_close()


def _sibling(name: str, content: bytes, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A file as `?blobs=true` lists it; weights are in LFS."""
    size = sizes.get(name, len(content))
    sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": hashlib.sha1(content).hexdigest()}
    if name.endswith((".gguf", ".safetensors")):
        sibling["lfs"] = {"size": size, "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 100}
    return sibling

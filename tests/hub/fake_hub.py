"""A hub on this machine that answers as Hugging Face's does."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from realizar.hub.folders import user_cache
from waits import HANG_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"


_CHUNK_BYTES = 1 << 18
_COUNT = threading.Lock()


@dataclass(frozen=True)
class Sparse:
    """A file of a size that no test keeps: some bytes, and zeros after them."""

    start: bytes
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        first, last, _ = part.indices(self.size)
        return self.start[first:last] + bytes(max(last - max(first, len(self.start)), 0))


Content = bytes | Sparse


@dataclass
class Endpoint:
    """A running endpoint.

    Attributes:
        url: its address.
        requests: those that it saw.
        sizes, digests: those of files that it tells, where they are not true.
        held: names of files of which it sends the first half, and the rest once they are removed.
        half_sent: set when a first half is.
        cuts: bytes after which the next answers of files break off, each number for one of them.
        wrong: names of files that it sends with a wrong byte.
        pace_s: seconds that it waits after each chunk of 256 KiB.
        gives_ranges: False to answer range requests with whole files.
        sent_bytes: of all bodies that it sent.
    """

    url: str
    requests: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    half_sent: threading.Event = field(default_factory=threading.Event)
    cuts: list[int] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    pace_s: float = 0
    gives_ranges: bool = True
    sent_bytes: int = 0

    def variables(self, folder: Path) -> dict[str, str]:
        """Variables with which the library asks this endpoint, and caches below a folder, but for compiled kernels."""
        kernels = folder / "cache" / "realizar" / "kernels"
        if not kernels.is_symlink():
            kept = user_cache() / "kernels"
            for each in (kept, kernels.parent):
                each.mkdir(parents=True, exist_ok=True)
            kernels.symlink_to(kept)
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}

    def run(
        self, folder: Path, *arguments: str, program: Sequence[str] = ("-m", "realizar"), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own: huggingface_hub reads its variables when it is imported.

        `program` has Python's own words, where it is not the plain command.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return subprocess.run(
            [sys.executable, *program, *arguments],
            capture_output=True,
            text=True,
            env=environment | self.variables(folder) | variables,
            timeout=HANG_S,
            check=False,
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    endpoint: Endpoint
    repositories: Mapping[str, Mapping[str, Content]]
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
        siblings = [_sibling(name, content, self.endpoint) for name, content in self.repositories[repo].items()]
        record = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._answer(200, json.dumps(record).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, repo: str, revision: str, name: str) -> None:
        content = self.repositories[repo].get(name) if self._may_see(repo) and revision in ("main", COMMIT) else None
        if content is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_sha256(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if name in self.endpoint.wrong:
            content = content[: len(content) // 2] + b"!" + content[len(content) // 2 + 1 :]
        first, last = 0, len(content)
        if part is not None and self.endpoint.gives_ranges:
            first, last = int(part[1]), min(last, int(part[2]) + 1 if part[2] else last)
            headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(content)}"
        status = 206 if "Content-Range" in headers else 200
        self._answer(status, content, headers, held=name in self.endpoint.held and name, part=(first, last))

    def _may_see(self, repo: str) -> bool:
        private = repo == "user/private" and self.headers.get("Authorization") != "Bearer secret"
        return repo in self.repositories and not private

    def _answer(
        self,
        status: int,
        body: Content,
        headers: dict[str, str] | None = None,
        held: str | Literal[False] = False,
        part: tuple[int, int] | None = None,
    ) -> None:
        first, last = part or (0, len(body))
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(last - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        with suppress(ConnectionError):
            if part is not None and self.endpoint.cuts:
                self._send(body, first, min(first + self.endpoint.cuts.pop(), last))
                self.close_connection = True
                return
            half = (first + last) // 2
            self._send(body, first, half)
            while held and held in self.endpoint.held:
                self.endpoint.half_sent.set()
                time.sleep(0.01)
            self._send(body, half, last)

    def _send(self, body: Content, first: int, last: int) -> None:
        for start in range(first, last, _CHUNK_BYTES):
            piece = body[start : min(start + _CHUNK_BYTES, last)]
            self.wfile.write(piece)
            time.sleep(self.endpoint.pace_s)
            with _COUNT:
                self.endpoint.sent_bytes += len(piece)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@contextmanager
def fake_hub(repositories: Mapping[str, Mapping[str, Content]]) -> Iterator[Endpoint]:
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


def _sibling(name: str, content: Content, endpoint: Endpoint) -> dict[str, Any]:
    """A file as `?blobs=true` lists it; weights are in LFS."""
    size = endpoint.sizes.get(name, len(content))
    sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": _sha256(content)[:40]}
    if name.endswith((".gguf", ".safetensors")):
        sha256 = endpoint.digests.get(name, _sha256(content))
        sibling["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 100}
    return sibling


@functools.lru_cache
def _sha256(content: Content) -> str:
    """Of a sparse file that of its beginning."""
    return hashlib.sha256(content.start if isinstance(content, Sparse) else content).hexdigest()

"""Serves a generated model with a real vocabulary: time from start to ready, cold and warm, then many streams at once.

python scripts/cuda_serve.py --shape llama-8b --streams 256
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realizar.bench import generate
from realizar.bench.shapes import SHAPES, FileType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint

_VOCABULARY = Path(__file__).parent.parent / "tests" / "data" / "tokenizers" / "llama-bpe.gguf.xz"
_VOCABULARY_SIZE = 128256
_TEMPLATE = """{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_REALIZAR = [sys.executable, "-c", "from realizar.cli.main import main; main()"]
_READY_S = 300


def write_model(shape_name: str, path: Path, folder: Path, file_type: FileType = "q4_k_m") -> None:
    """A random model with the vocabulary of Llama 3 and a template; matrices of one shape and type have the same bytes.

    Args:
        shape_name: a key of `SHAPES`; one with a vocabulary of another size gets that of Llama 3.
    """
    shape = replace(SHAPES[shape_name], vocab_size=_VOCABULARY_SIZE)
    plain = folder / "vocabulary.gguf"
    plain.write_bytes(lzma.decompress(_VOCABULARY.read_bytes()))
    vocabulary = {k: v for k, v in open_checkpoint(plain).metadata.items() if k.startswith("tokenizer.")}
    vocabulary.setdefault("tokenizer.chat_template", _TEMPLATE)
    metadata: dict[str, Any] = {**generate._metadata(shape, shape_name, file_type), **vocabulary}
    tensors = list(generate._tensors(shape, file_type, 0))
    first = {(tensor.ggml_type, tuple(tensor.shape)): tensor for tensor in reversed(tensors)}

    @cache
    def made(key: Any) -> np.ndarray:
        data = first[key].data
        return np.ascontiguousarray(data() if callable(data) else data)

    write_gguf(
        path, metadata,
        [NewTensor(t.name, t.ggml_type, t.shape, partial(made, (t.ggml_type, tuple(t.shape)))) for t in tensors],
    )  # fmt: skip


class Running(NamedTuple):
    """A server: seconds until it was ready, and the process that was started."""

    ready_s: float
    pid: int


@contextlib.contextmanager
def served(path: Path, port: int, options: Sequence[str], cache_folder: Path) -> Iterator[Running]:
    """A server of the model while the block lasts. Args: options: of `realizar serve`."""
    command = [*_REALIZAR, "serve", str(path), "--port", str(port), "--log-level", "warning", *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_folder), "TRITON_CACHE_DIR": str(cache_folder / "triton")}
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() - started > _READY_S:
                raise SystemExit("the server did not become ready")
            time.sleep(0.05)
        yield Running(time.monotonic() - started, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def load(arguments: argparse.Namespace, streams: int) -> None:
    command = [
        *_REALIZAR, "bench-serve", "--url", f"http://127.0.0.1:{arguments.port}", "--concurrency", str(streams),
        "--requests", str(2 * streams), "--prompt-words", "128", "--output-tokens", str(arguments.output_tokens),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=("llama-8b", "llama-1b"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8791)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.gguf"
        write_model(arguments.shape, path, folder)
        print(f"{path.stat().st_size / 1e9:.2f} GB written", flush=True)
        options = ["--device", arguments.device, "--max-running", str(arguments.streams), "--context-length", "1024"]
        with served(path, arguments.port, options, folder / "cache") as server:
            print(f"start to ready, nothing compiled: {server.ready_s:.1f} s", flush=True)
        with served(path, arguments.port, options, folder / "cache") as server:
            print(f"start to ready, all compiled: {server.ready_s:.1f} s", flush=True)
            for streams in sorted({1, arguments.streams}):
                load(arguments, streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())

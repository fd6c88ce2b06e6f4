"""Serves a generated model with a real vocabulary: time from start to ready, cold and warm, then many streams at once.

python scripts/cuda_serve.py --shape llama-8b --streams 256 [--replicas 2]
python scripts/cuda_serve.py --turns llama-8b qwen2.5-1.5b llama-1b

With `--replicas` as many engines, each with a GPU, serve as many times the streams afterwards, and as many in all.

With `--turns` several models take turns on the GPU, within what the largest takes beside the others asleep. Each is
asked in turn, greedily: its text must stay the same. Lines tell how long each sleep and each waking took, its share of
the bus's speed (of one large pinned copy, in a process of its own), and the GPU's memory as nvidia-smi counts it. Then
many clients ask at once. The exit status is 1 where a text changed, an audit found something or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import lzma
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import uvicorn
from soak_models import ask_in_turn

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.options.several_models import SeveralModelsOptions
from realizar.cli.several_models import Wishes, make_shelf
from realizar.config import EngineConfig
from realizar.engine.process.planning import plan_loads
from realizar.models.generated import generate
from realizar.models.generated.shapes import SHAPES, FileType
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app_of
from realizar.server.http.listen import uvicorn_config
from realizar.server.models.shelf import ModelShelf
from realizar.server.run import open_port
from realizar.server.settings import ServerSettings

_VOCABULARY = Path(__file__).parent.parent / "tests" / "data" / "tokenizers" / "llama-bpe.gguf.xz"
_VOCABULARY_SIZE = 128256
_TEMPLATE = """{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_REALIZAR = [sys.executable, "-c", "from realizar.cli.main import main; main()"]
_READY_S = 300
_BUS = """
import torch, time, json
size = 4 << 30
host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
device = torch.empty(size, dtype=torch.uint8, device="cuda")
found = {}
for name, to, of in (("to the GPU", device, host), ("to the host", host, device)):
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    found[name] = size / min(seconds)
print(json.dumps(found))
"""
_CHANGE = re.compile(r"(\S+): (asleep|awake), .*? in ([\d.]+) s, ([\d.]+) GB/s")
_PROMPT = "The history of the copper letter in the winter garden"


def write_model(
    shape_name: str, path: Path, folder: Path, file_type: FileType = "q4_k_m", context_length: int = 0
) -> None:
    """A random model with the vocabulary of Llama 3 and a template; matrices of one shape and type have the same bytes.

    Vectors, and whatever else is in float32, are a tensor's own: what a state decays by has the shape of a bias.

    Args:
        shape_name: a key of `SHAPES`; one with a vocabulary of another size gets that of Llama 3.
        context_length: the model's in tokens, where that of its shape is less.
    """
    shape = SHAPES[shape_name]
    shape = replace(shape, vocab_size=_VOCABULARY_SIZE, context_length=max(shape.context_length, context_length))
    plain = folder / "vocabulary.gguf"
    plain.write_bytes(lzma.decompress(_VOCABULARY.read_bytes()))
    vocabulary = {k: v for k, v in open_checkpoint(plain).metadata.items() if k.startswith("tokenizer.")}
    vocabulary.setdefault("tokenizer.chat_template", _TEMPLATE)
    metadata: dict[str, Any] = {**generate._metadata(shape, shape_name, file_type), **vocabulary}
    tensors = list(generate._tensors(shape, file_type, 0))
    first = {_bytes_of(tensor): tensor for tensor in reversed(tensors)}

    @cache
    def made(key: Any) -> np.ndarray:
        data = first[key].data
        return np.ascontiguousarray(data() if callable(data) else data)

    write_gguf(
        path, metadata,
        [NewTensor(t.name, t.ggml_type, t.shape, partial(made, _bytes_of(t))) for t in tensors],
    )  # fmt: skip


def _bytes_of(tensor: NewTensor) -> Any:
    """The same for tensors that have the same bytes in a model of `write_model`."""
    return tensor.name if tensor.ggml_type is GGMLType.F32 else (tensor.ggml_type, tuple(tensor.shape))


class Running(NamedTuple):
    """A server: seconds until it was ready, and the process that was started."""

    ready_s: float
    pid: int


@contextlib.contextmanager
def served(
    path: Path, port: int, options: Sequence[str], cache_folder: Path, checkout: Path | None = None
) -> Iterator[Running]:
    """A server of the model while the block lasts, of another `checkout` where one is given.

    `options` are those of `realizar serve`.
    """
    command = [*_REALIZAR, "serve", str(path), "--port", str(port), "--log-level", "warning", *options]
    caches = {"XDG_CACHE_HOME": ".", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    environment = os.environ | {name: str(cache_folder / of) for name, of in caches.items()}
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout / "src")
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


def bus_bytes_s() -> dict[str, float]:
    """Bytes a second of a large pinned copy each way."""
    done = subprocess.run([sys.executable, "-c", _BUS], stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def used_bytes() -> int:
    """Memory of the GPU that all programs use."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[0]) << 20


class Lines(logging.Handler):
    """The server's lines about models, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        print(f"    {self.lines[-1]}", flush=True)


async def take_turns(shelf: ModelShelf, url: str, rounds: int) -> tuple[dict[str, set[str]], list[str]]:
    """Ask each model in turn; all texts by model, and what audits found."""
    texts: dict[str, set[str]] = {}
    faults: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for turn in range(rounds):
            for each in shelf.listed():
                name = each.names[0]
                body = {"model": name, "prompt": _PROMPT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
                started_s = time.perf_counter()
                answer = await client.post("/v1/completions", json=body)
                seconds = time.perf_counter() - started_s
                answer.raise_for_status()
                texts.setdefault(name, set()).add(answer.json()["choices"][0]["text"])
                found = await shelf.audits()
                faults += [f"{key}: {fault}" for key, fault in found.items() if fault is not None]
                states = ", ".join(f"{one.names[0]} {one.state}" for one in shelf.listed())
                held = sum(one.held_bytes for one in shelf.listed())
                print(
                    f"round {turn}, {name}: answered in {seconds:.2f} s; nvidia-smi {used_bytes() / 1e9:.2f} GB,"
                    f" planned {held / 1e9:.2f} GB; {states}; audits of {len(found)}: {faults or 'clean'}",
                    flush=True,
                )
    return texts, faults


async def load_all(shelf: ModelShelf, url: str, seconds: float, clients: int) -> Counter[str]:
    """Answers, by status, of many clients that ask for the models in turn."""
    counts: Counter[str] = Counter()
    names = [each.names[0] for each in shelf.listed()]
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(ask_in_turn(url, names, each, until_s, counts) for each in range(clients)))
    return counts


async def measure_turns(arguments: argparse.Namespace, paths: list[str]) -> int:
    """Serve, ask, report; the exit status."""
    config = EngineConfig(
        context_length=2048, kv_cache_bytes=arguments.kv_cache_bytes, device=arguments.device, max_running=64
    )
    loads = [answer.checked() for answer in plan_loads(paths, config, 120 << 30)]
    memory = max(each.num_bytes for each in loads) + sum(each.asleep_bytes for each in loads)
    print(f"{sum(each.num_bytes for each in loads) / 1e9:.2f} GB in all, bound {memory / 1e9:.2f} GB", flush=True)
    lines = Lines()
    logging.getLogger("realizar.server.models").addHandler(lines)
    logging.getLogger("realizar.server.models").setLevel("INFO")
    wishes = Wishes(config, lambda _: SamplingParams(), None, "warning")
    settings = ServerSettings(log_requests=False)
    options = SeveralModelsOptions(memory=memory, sleep_memory=arguments.sleep_memory)
    print(f"nvidia-smi before: {used_bytes() / 1e9:.2f} GB", flush=True)
    shelf = make_shelf(paths, options, wishes, settings)
    listener = open_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn_config(create_app_of(shelf, settings), settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    texts, faults = await take_turns(shelf, url, arguments.rounds)
    bus = await asyncio.to_thread(bus_bytes_s)
    print({name: f"{rate / 1e9:.1f} GB/s" for name, rate in bus.items()}, flush=True)
    for line in lines.lines:
        if found := _CHANGE.match(line):
            way = "to the GPU" if found[2] == "awake" else "to the host"
            print(f"{found[1]} {found[2]}: {found[3]} s, {float(found[4]) * 1e9 / bus[way]:.0%} of the bus", flush=True)
    counts = await load_all(shelf, url, arguments.seconds, arguments.clients)
    found_last = {name: fault for name, fault in (await shelf.audits()).items() if fault is not None}
    text = (await shelf.exposition(())).decode()
    shown = ("realizar:model_loads_total{", "realizar:model_wakes_total{")
    print(*(line for line in text.splitlines() if line.startswith(shown)), sep="\n")
    left_open = shelf.num_open
    server.should_exit = True
    await serving
    await shelf.close()
    changed = [name for name, all_texts in texts.items() if len(all_texts) != 1]
    print(f"answers {dict(counts)}; audits {faults or found_last or 'clean'}; left open {left_open}; changed {changed}")
    return int(bool(changed or faults or found_last or left_open or set(counts) - {"200", "left"}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=("llama-8b", "llama-1b"))
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--turns", nargs="+", metavar="SHAPE", choices=tuple(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kv-cache-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--sleep-memory", type=int, default=40_000_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.turns:
            for shape in arguments.turns:
                write_model(shape, folder / f"{shape}.gguf", folder)
            return asyncio.run(measure_turns(arguments, [str(folder / f"{shape}.gguf") for shape in arguments.turns]))
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
        if arguments.replicas > 1:
            more = ["--replicas", str(arguments.replicas)]
            with served(path, arguments.port, [*options, *more], folder / "cache") as server:
                print(f"start to ready, {arguments.replicas} replicas: {server.ready_s:.1f} s", flush=True)
                for streams in (arguments.streams, arguments.replicas * arguments.streams):
                    load(arguments, streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())

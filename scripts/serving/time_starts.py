"""Seconds from the start of `realizar serve` until it is ready, and until the first token is there, cold and warm.

    python scripts/serving/time_starts.py --shapes llama-8b,qwen3.6-27b --runs 5 --folder /dev/shm

A model of a shape with random weights is written first, so that its pages are in memory. A cold start has nothing
compiled, by this project, Triton or the driver; a warm one is the second with its folders, or a later one. The first
token is that of a short prompt, sent when the server is ready. Prints each start, and the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from realizar.models.generated.generate import file_type_of
from realizar.models.generated.shapes import SHAPES

sys.path.insert(0, str(Path(__file__).parents[1]))
from cuda_serve import served, write_model

_PROMPT = "The history of the copper letter in the winter garden"


class Start(NamedTuple):
    """Seconds from the start of the process until each."""

    ready_s: float
    first_token_s: float


def time_start(path: Path, port: int, options: list[str], caches: Path) -> Start:
    with served(path, port, options, caches) as server:
        begin_s = time.perf_counter()
        body = {"model": path.stem, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            json.load(answer)
        return Start(server.ready_s, server.ready_s + time.perf_counter() - begin_s)


def report(label: str, starts: list[Start]) -> None:
    ready, first = ([start[place] for start in starts] for place in (0, 1))
    for name, seconds in (("ready", ready), ("first token", first)):
        shown = ", ".join(f"{each:.1f}" for each in seconds)
        print(f"{label}, {name}: {statistics.median(seconds):.1f} s of {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama-8b,qwen3.6-27b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--kinds", default="cold,warm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--port", type=int, default=8797)
    parser.add_argument("--folder", type=Path, help="for the models; on Linux /dev/shm is in memory")
    parser.add_argument("options", nargs="*", help="of `realizar serve`, after --")
    arguments = parser.parse_args()
    options = ["--device", arguments.device, *arguments.options]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for shape in arguments.shapes.split(","):
            path = Path(name) / f"{shape}.gguf"
            write_model(shape, path, Path(name), file_type_of(shape))
            print(f"{shape}: {path.stat().st_size / 1e9:.2f} GB written", flush=True)
            starts: dict[str, list[Start]] = {}
            for run in range(arguments.runs):
                with tempfile.TemporaryDirectory() as caches:
                    for kind in arguments.kinds.split(","):
                        start = time_start(path, arguments.port, options, Path(caches))
                        starts.setdefault(kind, []).append(start)
                        print(f"{shape}, {kind} {run}: {start.ready_s:.1f}, {start.first_token_s:.1f} s", flush=True)
            for kind, found in starts.items():
                report(f"{shape}, {kind}", found)
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

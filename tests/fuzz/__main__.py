"""`python -m fuzz`, with `tests` on the path: what `make fuzz` runs."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from fuzz.read_files import faults
from fuzz.report import Report
from fuzz.run import Extent, Run
from fuzz.server import fuzzed_server
from realizar.checkpoint.open import open_checkpoint
from realizar.hub.pull import pull
from tiny_model import write_reranker, write_tiny_model


def fuzz_models(models: str, extent: Extent, api_processes: int) -> Report:
    """One server with these models (`tiny` and `reranker` are made here), one run."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [_path_of(model, folder) for model in models.split("+")]
        vocab_size = len(open_checkpoint(paths[0]).metadata["tokenizer.ggml.tokens"])
        options: tuple[str, ...] = ("--keep-alive", "2") if len(paths) > 1 else ()
        options += ("--speculative-tokens", "3") if models == "tiny" else ()
        options += () if api_processes == 1 else ("--api-processes", str(api_processes))
        with fuzzed_server([str(path) for path in paths], folder, *options) as server:
            asyncio.run(Run(server, extent, vocab_size, report).run())
    print(f"{models}: {report.summary()}", flush=True)
    return report


def _path_of(model: str, folder: Path) -> Path:
    path = folder / f"{model}.gguf"
    if model == "tiny":
        write_tiny_model(path)
    elif model == "reranker":
        write_reranker(path, ["no", "yes"])
    else:
        path = pull(model)
    return path


def fuzz_files(seed: int, count: int) -> Report:
    """Read `count` hostile model files as the commands do."""
    report = Report()
    for fault in faults(seed, 0, count):
        report.fault(fault)
    report.counts["model files"] = count
    print(f"files: {report.summary()}", flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="of all models together")
    parser.add_argument("--seed", type=int, default=1, help="what is sent follows from it")
    parser.add_argument("--model", action="append", help="a name, a path, tiny or reranker; A+B in one server")
    parser.add_argument("--first", type=int, default=0, help="the first request's number, to send one again")
    parser.add_argument("--count", type=int, help="how many requests at most, for each model")
    parser.add_argument("--files", type=int, default=400, help="hostile model files; none where --count is given")
    parser.add_argument("--clients", type=int, default=12, help="hostile clients at a time")
    parser.add_argument("--api-processes", type=int, help="as of `realizar serve`; default 2 for tiny, else 1")
    given = parser.parse_args()
    models = given.model or ["smollm2:135m", "tiny", "tiny+reranker"]
    extent = Extent(given.seed, given.seconds / len(models), given.first, given.count, given.clients)
    reports = [fuzz_files(given.seed, given.files)] if given.count is None and given.files else []
    reports += [fuzz_models(each, extent, given.api_processes or (2 if each == "tiny" else 1)) for each in models]
    return int(any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())

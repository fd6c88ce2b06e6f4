"""`python -m fuzz.read_files`, with `tests` on the path: hostile model files through what the commands do with them.

Each is read by a process with a bound on its memory, and must give a model or an error of ours, in one printable line,
within five seconds of the processor's time and 64 MB. The process is started again after a crash, which is a fault too.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.files import FILE, hostile_model
from realizar.errors import CheckpointError, RealizarError

_MOST_SECONDS, _MOST_MEMORY = 5.0, 64 << 10  # several times what a slow machine takes; KiB, as Linux counts
_ADDRESS_SPACE = 6 << 30
_HANGS_S = 120.0  # a guard; the processor's time is what is bounded
_TEXTS = ("Hi", "", "a b ▁c <s> é日本 \n\n 1234", "a" * 3000 + "!", " " * 500)
_RUNS = 0.1


def read_model(files: dict[str, bytes], folder: Path, *, run: bool) -> str:
    """Read a model and return `read`, `ran`, or the line of our error. Other exceptions are raised."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    try:
        return _read(folder / FILE if FILE in files else folder, run=run)
    except RealizarError as error:
        return _line(error)


def _read(path: Path, *, run: bool) -> str:
    from realizar.checkpoint.open import open_checkpoint
    from realizar.cli.commands.inspect import _report, why_not_runnable
    from realizar.tokenizer.load import load_tokenizer
    from realizar.tokenizer.templates.chat_template import ChatTemplate

    checkpoint = open_checkpoint(path)
    reason = why_not_runnable(checkpoint)
    for line in _report(checkpoint, reason):
        if not line.isprintable():
            raise AssertionError(f"a line of the report is not printable: {line!a}"[:300])
    tokenizer = load_tokenizer(checkpoint)
    for text in _TEXTS:
        tokenizer.decode(tokenizer.encode(text))
    ChatTemplate(tokenizer).encode([{"role": "user", "content": "Hi <s> there</s>"}])
    if run and reason is None:
        _run(path)
        return "ran"
    return "read"


def _run(path: Path) -> None:
    from realizar.config import EngineConfig
    from realizar.engine.llm import LLM
    from realizar.sampling_params import SamplingParams

    with LLM(str(path), config=EngineConfig(threads=1, max_running=1, device="cpu")) as llm:
        llm.generate(["ab"], SamplingParams(max_tokens=2))


def _line(error: RealizarError) -> str:
    from realizar.cli.terminal.printable import error_line

    line = error_line(error)
    if not line.isprintable() or len(line) > 5000:
        raise AssertionError("the error is no printable line")
    if isinstance(error, CheckpointError) and (not error.where or not error.reason):
        raise AssertionError(f"the error does not say where or why: {line}")
    return line


def _used() -> tuple[float, int]:
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _work(seed: int, first: int, count: int, *, runs: bool) -> None:
    """Run in the bounded process: print a line before each file, and one for each fault."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    for index in range(first, first + count):
        print(f"file {index}", flush=True)
        rng = Random(f"{seed}/{index}")
        files = hostile_model(rng)
        run = runs and rng.random() < _RUNS
        with tempfile.TemporaryDirectory() as folder:
            seconds, memory = _used()
            try:
                outcome = read_model(files, Path(folder), run=run)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                print(f"fault {index} {type(error).__name__}: {ascii(str(error))[:300]}", flush=True)
                continue
        after, grown = _used()
        print(f"said {index} {outcome!a}", flush=True)
        if index > first and not run and after - seconds > _MOST_SECONDS:
            print(f"fault {index} took {after - seconds:.1f} s", flush=True)
        if index > first and not run and grown - memory > _MOST_MEMORY:
            print(f"fault {index} took {(grown - memory) >> 10} MB", flush=True)


def faults(seed: int, first: int, count: int, *, runs: bool = False, notes: list[str] | None = None) -> Iterator[str]:
    """The faults of files `first` to `first + count` of a seed; each has the command that reads the file again.

    Args:
        runs: true also runs some of the loaded models, which compiles kernels.
        notes: gets a line about each file.
    """
    last, end = first, first + count
    while first < end:
        command = [sys.executable, "-m", "fuzz.read_files", "--work", "--seed", str(seed)]
        command += ["--first", str(first), "--count", str(end - first), *(["--runs"] if runs else [])]
        path = ":".join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
        with tempfile.TemporaryFile("w+") as log:
            worker = subprocess.Popen(
                command, stdout=log, stderr=subprocess.DEVNULL, env={"PYTHONPATH": path, "HOME": str(Path.home())}
            )
            try:
                worker.wait(_HANGS_S + 2.0 * (end - first))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            log.seek(0)
            lines = log.read().splitlines()
        for line in lines:
            kind, index, *rest = line.split(" ", 2)
            last = int(index)
            if kind == "fault":
                yield f"{_named(seed, index)}: {rest[0]}"
            elif kind == "said" and notes is not None:
                notes.append(rest[0])
        if worker.returncode != 0:
            yield f"{_named(seed, last)}: the process ended with status {worker.returncode}"
        first = end if worker.returncode == 0 else last + 1


def _named(seed: int, index: int | str) -> str:
    return f"python -m fuzz.read_files --seed {seed} --first {index} --count 1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.read_files", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--runs", action="store_true", help="run some of the models that load")
    parser.add_argument("--show", action="store_true", help="what was said of each file, most frequent first")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        _work(given.seed, given.first, given.count, runs=given.runs)
        return 0
    notes: list[str] = []
    found = list(faults(given.seed, given.first, given.count, runs=given.runs, notes=notes))
    print("\n".join([*(notes if given.show else ()), *found, f"{given.count} files, {len(found)} faults"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

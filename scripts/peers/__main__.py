"""`make bench-peers`: realizar against llama.cpp and ik_llama.cpp."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from peers.compare import PeerModel, compare, read_model
from peers.report import as_markdown, as_record
from peers.roofline import roofline_svg
from peers.runs import Workload
from peers.tools import find_tools
from realizar.backends.machine import physical_cores
from realizar.cli.main import run_app
from realizar.cli.options.arguments import Integer
from realizar.cli.terminal.progress import download_progress
from realizar.hub.pull import resolve
from realizar.models.generated.generate import generated_model
from realizar.models.generated.shapes import SHAPES

app = App(name="bench-peers", result_action="return_value", suppress_keyboard_interrupt=False, help_format="plaintext")


@app.default
def bench_peers(
    *,
    models: Annotated[
        tuple[str, ...], Parameter(name="--model", negative=(), help="Model to measure; may be repeated.")
    ] = (
        "smollm2:135m",
        "gemma3:270m",
        "llama-1b",
    ),
    threads: Annotated[
        tuple[int, ...], Parameter(negative=(), help="Numbers of threads; default 1, 2, all physical cores.")
    ] = (),
    rounds: Annotated[Integer, Parameter(help="Times that every program runs, in turn.")] = 3,
    prompt_tokens: Integer = 512,
    gen_tokens: Integer = 64,
    repeats: Annotated[Integer, Parameter(help="Samples in one run of a program.")] = 3,
    llama_bench: Annotated[
        Path | None, Parameter(help="llama.cpp's llama-bench; default PATH, else built by pip.")
    ] = None,
    environment: Annotated[Path | None, Parameter(help="Virtual environment with the peers' packages.")] = None,
    instruction_set: Annotated[
        str | None, Parameter(help="CPU instruction set to force on realizar; name a peer that is built for it.")
    ] = None,
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write all figures to this file.")] = None,
    picture: Annotated[Path | None, Parameter(help="Write the bandwidth picture, SVG, to this file.")] = None,
) -> None:
    """Measure decode and prefill beside llama.cpp and ik_llama.cpp, and print the ratios as Markdown.

    A model may be the name of a shape (llama-1b): a file of random Q4_K_M weights is made for it in the cache.
    """
    tools = find_tools(llama_bench, environment)
    files = [_model(name) for name in models]
    counts = sorted(set(threads)) or sorted({1, min(2, physical_cores()), physical_cores()})
    work = Workload(prompt_tokens, gen_tokens, repeats, instruction_set)
    results = compare(tools, files, counts, work, rounds, log=lambda text: print(text, file=sys.stderr, flush=True))
    print(as_markdown(results))
    if json_file is not None:
        json_file.write_text(json.dumps(as_record(results), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        title = f"Weights read per second in decode, {results.machine.processor}"
        picture.write_text(roofline_svg(results.rows, title), encoding="utf-8")


def _model(name: str) -> PeerModel:
    """A pulled model, or a random one in a known shape, kept in the cache between runs."""
    if name in SHAPES:
        return read_model(name, generated_model(name, lambda text: print(text, file=sys.stderr)))
    with download_progress() as progress:
        return read_model(name, resolve(name, progress))


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))

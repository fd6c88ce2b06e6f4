"""`realizar bench`: how fast a model reads and writes here. Needs the weights alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, Json, Model, Verbose, at_least
from realizar.cli.options.engine import BackendOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import report
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.bench.throughput import BatchResult
    from realizar.config import EngineConfig


_MOST_SKEW = 4


def bench_command(
    model: Model,
    /,
    *,
    prompt_tokens: Annotated[Integer, Parameter(help="Tokens of the prompt.")] = 512,
    gen_tokens: Annotated[Integer, Parameter(help="Tokens to decode after the prompt.")] = 64,
    batch: Annotated[str, Parameter(help="Sequences at once; several numbers with commas between.")] = "1",
    repeats: Annotated[Integer, Parameter(help="Times that each is measured.")] = 3,
    generate: Annotated[
        bool,
        Parameter(help="MODEL is a shape, such as olmoe-7b: measure random weights of it, kept in the user's cache."),
    ] = False,
    skew: Annotated[
        float, Parameter(help="With --generate, tokens prefer some experts by a Zipf law of this exponent.")
    ] = 0.0,
    verbose: Verbose = False,
    as_json: Json = False,
    backend: BackendOptions | None = None,
) -> None:
    """Measure prefill and decode in tokens per second."""
    show_log(verbose)
    from realizar.bench.throughput import Work, measure_throughput
    from realizar.engine.loading import find_checkpoint

    work = Work(
        at_least(1, "prompt-tokens", prompt_tokens), gen_tokens, _batches(batch), at_least(1, "repeats", repeats)
    )
    at_least(1, "gen-tokens", gen_tokens)
    config = (backend or BackendOptions()).config()
    if generate:
        model = str(_generated(model, config, skew))
    elif skew:
        raise InvalidRequestError("--skew is of weights that --generate makes", "skew")
    with download_progress() as progress:
        checkpoint = find_checkpoint(model, progress)
    with load_progress() as loading:
        results = measure_throughput(checkpoint, config, work, log=report, progress=loading)
    if as_json:
        print(json.dumps({"results": [asdict(result) for result in results]}))
    else:
        print("\n".join(_table(results)))


def _generated(shape: str, config: EngineConfig, skew: float) -> Path:
    """The file of a shape. What can't run is refused before gigabytes are written."""
    from realizar.backends.select import plan_memory, resolve_model
    from realizar.models.generated.generate import generated_header, generated_model
    from realizar.models.generated.shapes import SHAPES

    if shape not in SHAPES:
        raise InvalidRequestError(
            f"--generate: {shape!r} is not a shape; the shapes are {', '.join(SHAPES)}", "generate"
        )
    if not 0 <= skew <= _MOST_SKEW:
        raise InvalidRequestError(f"--skew must be from 0 to {_MOST_SKEW}, not {skew:g}", "skew")
    if skew and not SHAPES[shape].num_experts:
        raise InvalidRequestError(f"--skew: the shape {shape} has no experts", "skew")
    header = generated_header(shape)
    spec, resolved = resolve_model(header, config)
    plan_memory(spec, header, resolved).check_weights_fit()
    return generated_model(shape, report, skew)


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(at_least(1, "batch", int(number)) for number in text.split(","))
    except ValueError as error:
        raise InvalidRequestError(f"--batch must be numbers with commas between, not {text!r}", "batch") from error


def _table(results: list[BatchResult]) -> list[str]:
    lines = [f"{'batch':>5}  {'prefill tok/s':>26}  {'decode tok/s':>26}  {'GB/s':>6}"]
    for result in results:
        cells = [
            f"{spread.median:10.1f} ({spread.min:.1f}-{spread.max:.1f})"
            for spread in (result.prefill_tokens_per_s, result.decode_tokens_per_s)
        ]
        lines.append(f"{result.batch:>5}  {cells[0]:>26}  {cells[1]:>26}  {result.achieved_gb_per_s:6.1f}")
        if result.experts_read is not None:
            lines[-1] += f"  {result.experts_read:.1f} experts a layer, by chance {result.experts_by_chance:.1f}"
    last = results[-1]
    device = f", {format_bytes(last.device_memory_bytes)} of the GPU" if last.device_memory_bytes else ""
    lines.append(f"loaded in {last.load_s:.2f} s; peak memory {format_bytes(last.peak_memory_bytes)}{device}")
    return lines

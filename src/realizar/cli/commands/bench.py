"""Commands that measure a model here, by the weights alone.

`realizar bench`: how fast a model reads and writes. `realizar profile` shows the parts of one step, their times, and
the bound that memory sets. `realizar trace` shows each layer's values for one prompt, to find where they go wrong or
where two runs diverge. `realizar tune` finds the fastest tiles of a model's matmuls on this machine's GPU, for all
later runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, Json, Model, Verbose, at_least, check_folder
from realizar.cli.options.engine import BackendOptions, DraftOptions
from realizar.cli.options.loading import fetch_model, with_drafter
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import report
from realizar.errors import InvalidRequestError, UnsupportedModelError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.backends.cuda.matmul.tuning_table import ExpertLine, Line
    from realizar.backends.step_values import StageValues
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
    acceptance: Annotated[
        str | None,
        Parameter(
            help="Shares of steps in which one draft is right, two, and so on, such as 0.8,0.67,0.53: drafts are made"
            " as --drafter says, and others with these shares are verified in their place."
        ),
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    backend: BackendOptions | None = None,
    drafts: DraftOptions | None = None,
) -> None:
    """Measure prefill and decode in tokens per second."""
    show_log(verbose)
    from realizar.bench.throughput import Work, measure_throughput

    for name, value in (("prompt-tokens", prompt_tokens), ("repeats", repeats), ("gen-tokens", gen_tokens)):
        at_least(1, name, value)
    shares = None if acceptance is None else _shares(acceptance)
    work = Work(prompt_tokens, gen_tokens, _numbers("batch", batch), repeats, shares)
    config = (backend or BackendOptions()).config()
    if generate:
        model = str(_generated(model, config, skew))
    elif skew:
        raise InvalidRequestError("--skew is of weights that --generate makes", "skew")
    config = with_drafter((drafts or DraftOptions()).config(config))
    checkpoint = fetch_model(model)
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


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(at_least(1, name, int(number)) for number in text.split(","))
    except ValueError as error:
        raise InvalidRequestError(f"--{name} must be numbers with commas between, not {text!r}", name) from error


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        message = f"--acceptance must be shares with commas between, not {text!r}"
        raise InvalidRequestError(message, "acceptance") from error


def _table(results: list[BatchResult]) -> list[str]:
    from realizar.bench.throughput import right_drafts

    lines = [f"{'batch':>5}  {'prefill tok/s':>26}  {'decode tok/s':>26}  {'GB/s':>6}"]
    for result in results:
        cells = [
            f"{spread.median:10.1f} ({spread.min:.1f}-{spread.max:.1f})"
            for spread in (result.prefill_tokens_per_s, result.decode_tokens_per_s)
        ]
        lines.append(f"{result.batch:>5}  {cells[0]:>26}  {cells[1]:>26}  {result.achieved_gb_per_s:6.1f}")
        if result.experts_read is not None:
            lines[-1] += f"  {result.experts_read:.1f} experts a layer, by chance {result.experts_by_chance:.1f}"
        if result.tokens_per_step is not None:
            lines[-1] += f"  {result.tokens_per_step:.2f} tokens of a step with drafts"
            lines[-1] += f", {right_drafts(result.draft_tokens, result.accepted_tokens, result.acceptance)}"
    last = results[-1]
    device = f", {format_bytes(last.device_memory_bytes)} of the GPU" if last.device_memory_bytes else ""
    lines.append(f"loaded in {last.load_s:.2f} s; peak memory {format_bytes(last.peak_memory_bytes)}{device}")
    return lines


def profile_command(
    model: Model,
    /,
    *,
    batch: Annotated[Integer, Parameter(help="Sequences of the step.")] = 1,
    tokens: Annotated[Integer, Parameter(help="Tokens of each row; 1 is a decode.")] = 1,
    context: Annotated[Integer, Parameter(help="Tokens of each row before the step.")] = 512,
    repeats: Annotated[Integer, Parameter(help="Times that each part is measured; the best counts.")] = 10,
    svg: Annotated[Path | None, Parameter(help="Draw the profile into this file.")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    backend: BackendOptions | None = None,
    drafts: DraftOptions | None = None,
) -> None:
    """Take one step apart: time of each part, and its share of what memory can deliver.

    Where drafts are asked for, a text is generated with them, and they are counted.
    """
    show_log(verbose)
    from realizar.bench.profile import StepWork, profile_drafts, profile_step, profile_svg, profile_table

    for name, value, least in (("batch", batch, 1), ("tokens", tokens, 1), ("context", context, 0)):
        at_least(least, name, value)
    work = StepWork(batch, tokens, context, at_least(1, "repeats", repeats))
    check_folder(svg)
    config = (backend or BackendOptions()).config()
    drafted = with_drafter((drafts or DraftOptions()).config(config))
    checkpoint = fetch_model(model)
    with load_progress() as loading:
        profile = profile_step(checkpoint, config, work, log=report, progress=loading)
    if drafted.most_drafts:
        with load_progress() as loading:
            profile = replace(profile, drafts=profile_drafts(checkpoint, drafted, work, log=report, progress=loading))
    if svg is not None:
        title = f"{model} on {profile.device}: {batch} x {tokens} tokens after {context}"
        svg.write_text(profile_svg(profile, title), encoding="utf-8")
    print(json.dumps(asdict(profile)) if as_json else "\n".join(profile_table(profile)))


def trace_command(
    model: Model,
    prompt: Annotated[str, Parameter(help="The prompt, used without a chat template.")],
    /,
    *,
    against: Annotated[
        Path | None, Parameter(help="Compare with the JSON of another run (other device or options).")
    ] = None,
    tolerance: Annotated[float, Parameter(help="Relative distance from which two runs count as different.")] = 0.1,
    verbose: Verbose = False,
    as_json: Json = False,
    engine: BackendOptions | None = None,
) -> None:
    """Show each layer's residual stream for a prompt: norm, largest value, and how many values are NaN or infinite.

    `realizar trace MODEL PROMPT --device cpu --json > cpu.json`, then `realizar trace MODEL PROMPT --device cuda
    --against cpu.json` shows the layer at which the two part.
    """
    show_log(verbose)
    from realizar.bench.profile import trace_prompt
    from realizar.tokenizer.load import load_tokenizer

    other = None if against is None else _read(against)
    checkpoint = fetch_model(model)
    tokens = load_tokenizer(checkpoint).encode(prompt)
    if not tokens:
        raise InvalidRequestError("the prompt is empty", "prompt")
    if other is not None and other[0] != tokens:
        raise InvalidRequestError(f"{against} has other token ids: it is from another prompt or tokenizer", "against")
    with load_progress() as loading:
        values = trace_prompt(checkpoint, (engine or BackendOptions()).config(), tokens, loading)
    if as_json:
        print(json.dumps({"tokens": tokens, "values": [asdict(each) for each in values]}))
    else:
        print("\n".join(trace_lines(values, None if other is None else other[1], tolerance)))


def trace_lines(values: Sequence[StageValues], other: Sequence[StageValues] | None, tolerance: float) -> list[str]:
    """A line for each stage, then the stages at which values stop being finite and at which two runs diverge.

    It raises InvalidRequestError if the other run is of another model.
    """
    from realizar.backends.step_values import distance

    if other is not None and [each.stage for each in other] != [each.stage for each in values]:
        raise InvalidRequestError("the other run's model has other layers", "against")
    apart = [None] * len(values) if other is None else [distance(*pair) for pair in zip(values, other, strict=True)]
    header = f"{'stage':<28} {'norm':>12} {'largest':>12} {'NaN':>8} {'inf':>8}"
    lines = [header + ("" if other is None else f" {'distance':>9}")]
    for each, far in zip(values, apart, strict=True):
        line = f"{each.stage:<28} {each.norm:>12.5g} {each.largest:>12.5g} {each.num_nan:>8} {each.num_inf:>8}"
        lines.append(line if far is None else f"{line} {far:>9.2%}")
    bad = next((each.stage for each in values if each.num_nan or each.num_inf), None)
    if bad is not None:
        lines.append(f"values are not finite from {bad} on")
    if other is not None:
        diverged = next(
            (each.stage for each, far in zip(values, apart, strict=True) if far is not None and far > tolerance), None
        )
        lines.append(
            f"the two runs diverge at {diverged}" if diverged else f"the two runs agree within {tolerance:.0%}"
        )
    return lines


def _read(path: Path) -> tuple[list[int], list[StageValues]]:
    from realizar.backends.step_values import StageValues

    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        values = [StageValues(**{**each, "samples": tuple(each["samples"])}) for each in found["values"]]
        return [int(token) for token in found["tokens"]], values
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError(f"{path} is not an output of `realizar trace --json`", "against") from error


def tune_command(
    model: Model,
    /,
    *,
    tokens: Annotated[
        str | None, Parameter(help="Numbers of tokens to tune for, with commas between; default 1 to 2048.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure a model's matmuls, experts' too, on this machine's GPU and keep the fastest tiles. Takes some minutes."""
    show_log(verbose)
    from realizar.backends.device_choice import choose_device
    from realizar.backends.select import refusal
    from realizar.models.check_tensors import check_tensors
    from realizar.models.registry import build_spec

    counts = None if tokens is None else tuple(sorted(set(_numbers("tokens", tokens))))
    device = choose_device("cuda")  # says what is missing
    checkpoint = fetch_model(model)
    spec = build_spec(checkpoint)
    if (reason := refusal(spec, "cuda")) is not None:
        raise UnsupportedModelError(reason)
    check_tensors(spec, checkpoint)

    from realizar.backends.cuda.device import open_device
    from realizar.backends.cuda.tuning.experts import tuned_experts
    from realizar.backends.cuda.tuning.measure import tune_device
    from realizar.backends.cuda.tuning.sweep import TOKEN_COUNTS, model_shapes

    shapes, mixtures = model_shapes(spec, checkpoint), tuned_experts(spec, checkpoint)
    if not shapes and not mixtures:
        raise UnsupportedModelError(f"{model} has no quantised matmuls, so there is nothing to tune")
    works: list[str] = []

    def measured(line: Line | ExpertLine) -> None:
        if works[-1:] != [line.work]:
            print(line.work, file=sys.stderr, flush=True)
        works.append(line.work)

    path = tune_device(open_device(device.index), shapes, counts or TOKEN_COUNTS, measured, mixtures)
    count = len(shapes) + len(mixtures)
    print(f"{len(works)} configurations were measured for {count} shapes; the fastest are saved in {path}")

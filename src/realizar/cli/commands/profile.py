"""`realizar profile` shows the parts of one step, their times, and the bound that memory sets.

`realizar trace` shows each layer's values for one prompt, to find where they go wrong or where two runs diverge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, Json, Model, Verbose, at_least, check_folder
from realizar.cli.options.engine import BackendOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import report
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.backends.step_values import StageValues


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
) -> None:
    """Take one step apart: time of each part, and its share of what memory can deliver."""
    show_log(verbose)
    from realizar.bench.profile import StepWork, profile_step, profile_svg, profile_table
    from realizar.engine.loading import find_checkpoint

    for name, value, least in (("batch", batch, 1), ("tokens", tokens, 1), ("context", context, 0)):
        at_least(least, name, value)
    work = StepWork(batch, tokens, context, at_least(1, "repeats", repeats))
    check_folder(svg)
    config = (backend or BackendOptions()).config()
    with download_progress() as progress:
        checkpoint = find_checkpoint(model, progress)
    with load_progress() as loading:
        profile = profile_step(checkpoint, config, work, log=report, progress=loading)
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
    from realizar.engine.loading import find_checkpoint
    from realizar.tokenizer.load import load_tokenizer

    other = None if against is None else _read(against)
    with download_progress() as fetching:
        checkpoint = find_checkpoint(model, fetching)
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

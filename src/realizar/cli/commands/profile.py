"""`realizar profile` shows the parts of one step, their times, and the bound that memory sets."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, Json, Model, Verbose, at_least, check_folder
from realizar.cli.options.engine import BackendOptions
from realizar.cli.terminal.load_progress import load_progress
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import report
from realizar.cli.terminal.progress import download_progress


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

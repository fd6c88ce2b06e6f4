"""`realizar tune` finds the fastest tiles of a model's matmuls on this machine's GPU, for all later runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Model, Verbose
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from realizar.backends.cuda.matmul.tuning_table import ExpertLine, Line


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
    from realizar.backends.select import choose_device, refusal_of_gpus
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve
    from realizar.models.check_tensors import check_tensors
    from realizar.models.registry import build_spec

    counts = None if tokens is None else _token_counts(tokens)
    device = choose_device("cuda")  # says what is missing
    with download_progress() as progress:
        checkpoint = open_checkpoint(resolve(model, progress))
    spec = build_spec(checkpoint)
    if (reason := refusal_of_gpus(spec)) is not None:
        raise UnsupportedModelError(reason)
    check_tensors(spec, checkpoint)

    from realizar.backends.cuda.device import open_device
    from realizar.backends.cuda.tuning.experts import tuned_experts
    from realizar.backends.cuda.tuning.measure import tune_device
    from realizar.backends.cuda.tuning.sweep import TOKEN_COUNTS, model_shapes

    shapes, mixtures = model_shapes(spec, checkpoint), tuned_experts(spec, checkpoint)
    if not shapes and not mixtures:
        raise UnsupportedModelError(f"{model} has no quantised matmuls, so there is nothing to tune")
    shown = _Progress()
    path = tune_device(open_device(device.index), shapes, counts or TOKEN_COUNTS, shown.measured, mixtures)
    count = len(shapes) + len(mixtures)
    print(f"{shown.count} configurations were measured for {count} shapes; the fastest are saved in {path}")


class _Progress:
    def __init__(self) -> None:
        self.count = 0
        self._last = ""

    def measured(self, line: Line | ExpertLine) -> None:
        self.count += 1
        if line.work != self._last:
            self._last = line.work
            print(line.work, file=sys.stderr, flush=True)


def _token_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(number) for number in text.split(",")}))
    except ValueError as error:
        raise InvalidRequestError(f"--tokens must be numbers with commas between, not {text!r}", "tokens") from error
    if counts[0] < 1:
        raise InvalidRequestError(f"--tokens must be at least 1, not {counts[0]}", "tokens")
    return counts

"""`realizar score` gives the log-probabilities of tokens, for scripts that measure fidelity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.json_lines import json_lines_writer, read_json_lines, text_of, tokens_of
from realizar.cli.options.arguments import InputLines, Integer, Model, OutputLines, Verbose
from realizar.cli.options.engine import EngineOptions
from realizar.cli.options.loading import load_model
from realizar.cli.terminal.log_lines import show_log
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.outputs import TokenLogprobs


def score_command(
    model: Model,
    /,
    *,
    lines_in: InputLines = Path("-"),
    lines_out: OutputLines = Path("-"),
    top_logprobs: Annotated[Integer, Parameter(help="Most probable ids to give at each position.")] = 0,
    verbose: Verbose = False,
    engine: EngineOptions | None = None,
) -> None:
    """Score JSON lines: {"tokens": [...]} or {"text": ...} gives the log-probability of each token.

    Entry i is for token i given those before it; the first is null.
    """
    show_log(verbose)
    if top_logprobs < 0:
        raise InvalidRequestError(f"--top-logprobs must be at least 0, not {top_logprobs}", "top_logprobs")
    with load_model(model, engine or EngineOptions()) as llm, json_lines_writer(lines_out) as output:
        for place, line in read_json_lines(lines_in):
            tokens = tokens_of(place, line)
            if tokens is None:
                tokens = llm.tokenizer.encode(text_of(place, line))
            try:
                scored = llm.score(tokens, top_logprobs)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{place}: {error}", error.param) from error
            output.write(json.dumps(_record(tokens, scored)) + "\n")


def _record(tokens: list[int], scored: list[TokenLogprobs | None]) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "logprobs": [None if entry is None else entry.logprob for entry in scored],
        "top_logprobs": [None if entry is None else [list(pair) for pair in entry.top] for entry in scored],
    }

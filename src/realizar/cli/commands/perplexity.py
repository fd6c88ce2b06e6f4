"""`realizar perplexity` measures how well a model predicts a text."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, Json, MaybeInteger, Model, Verbose
from realizar.cli.options.engine import EngineOptions
from realizar.cli.options.loading import load_model
from realizar.cli.terminal.log_lines import show_log
from realizar.errors import InvalidRequestError


def perplexity_command(
    model: Model,
    text_file: Annotated[Path, Parameter(allow_leading_hyphen=True, help="UTF-8 text; - is stdin.")],
    /,
    *,
    window: Annotated[Integer, Parameter(help="Tokens in one window.")] = 512,
    max_tokens: Annotated[MaybeInteger, Parameter(help="Score only this many first tokens of the text.")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    engine: EngineOptions | None = None,
) -> None:
    """Perplexity of a text: exp of the mean negative log-probability of its tokens.

    Windows overlap by half, so that every token but those of the first window is scored after at least half a window.
    """
    show_log(verbose)
    if window < 2:
        raise InvalidRequestError(f"--window must be at least 2, not {window}", "window")
    if max_tokens is not None and max_tokens < 2:
        raise InvalidRequestError(f"--max-tokens must be at least 2, not {max_tokens}", "max_tokens")
    with load_model(model, engine or EngineOptions()) as llm:
        tokens = llm.tokenizer.encode(_read(text_file), parse_special=False)[:max_tokens]
        if len(tokens) < 2:
            raise InvalidRequestError(f"{text_file} has fewer than two tokens", "text_file")
        losses: list[float] = []
        for start, first in windows(len(tokens), window):
            scored = llm.score(tokens[start : start + window])
            losses += [-entry.logprob for entry in scored[first - start :] if entry is not None]
            if sys.stderr.isatty():
                print(f"\r{len(losses)} of {len(tokens) - 1} tokens", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    perplexity, error = summary(losses)
    if as_json:
        print(json.dumps({"perplexity": perplexity, "standard_error": error, "tokens": len(losses), "window": window}))
    else:
        print(f"perplexity {perplexity:.4f} +- {error:.4f} over {len(losses)} tokens, window {window}")


def windows(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Starts of windows that overlap by half, each with its first scored position. Positions but 0 are scored once."""
    start, first = 0, 1
    while True:
        yield start, first
        first = start + size
        if first >= num_tokens:
            return
        start += size - size // 2


def summary(losses: Sequence[float]) -> tuple[float, float]:
    """Perplexity and its standard error (delta method on the mean loss)."""
    mean = sum(losses) / len(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / max(len(losses) - 1, 1)
    return math.exp(mean), math.exp(mean) * math.sqrt(variance / len(losses))


def _read(path: Path) -> str:
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 at byte {error.start}", "text_file") from error

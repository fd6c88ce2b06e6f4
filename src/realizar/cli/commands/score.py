"""`realizar score` gives the log-probabilities of tokens, for scripts that measure fidelity.

`realizar perplexity` measures how well a model predicts a text, and `realizar tokenize` gives a text's tokens.
The first and the last read and write JSON lines.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from realizar.cli.options.arguments import InputLines, Integer, Json, MaybeInteger, Model, OutputLines, Verbose
from realizar.cli.options.engine import EngineOptions
from realizar.cli.options.loading import fetch_model, load_model
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
    with load_model(model, engine or EngineOptions()) as llm, _json_lines_writer(lines_out) as output:
        for place, line in _read_json_lines(lines_in):
            tokens = _tokens_of(place, line)
            if tokens is None:
                tokens = llm.tokenizer.encode(_text_of(place, line))
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


def perplexity_command(
    model: Model,
    text_file: Annotated[Path, Parameter(allow_leading_hyphen=True, help="UTF-8 text; - is stdin.")],
    /,
    *,
    against: Annotated[str | None, Parameter(help="Another file of the model, to compare it with.")] = None,
    window: Annotated[Integer, Parameter(help="Tokens in one window.")] = 512,
    max_tokens: Annotated[MaybeInteger, Parameter(help="Score only this many first tokens of the text.")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
    engine: EngineOptions | None = None,
) -> None:
    """Perplexity of a text: exp of the mean negative log-probability of its tokens.

    Windows overlap by half, so that every token but those of the first window is scored after at least half a window.
    With another model the ratio to its perplexity is given, whose error is of the differences at each token, and the
    share of tokens at which both have the same most probable one.
    """
    show_log(verbose)
    if window < 2:
        raise InvalidRequestError(f"--window must be at least 2, not {window}", "window")
    if max_tokens is not None and max_tokens < 2:
        raise InvalidRequestError(f"--max-tokens must be at least 2, not {max_tokens}", "max_tokens")
    text, options = _read(text_file), engine or EngineOptions()
    tokens = _tokens_of_text(model, text, options.mmproj)[:max_tokens]
    if len(tokens) < 2:
        raise InvalidRequestError(f"{text_file} has fewer than two tokens", "text_file")
    if against is not None and _tokens_of_text(against, text, options.mmproj)[:max_tokens] != tokens:
        raise InvalidRequestError(f"{against} has other tokens for this text than {model}", "against")
    num_tops = int(against is not None)
    scored = _scored(model, tokens, window, options, num_tops)
    perplexity, error = summary([-entry.logprob for entry in scored])
    record: dict[str, Any] = {
        "perplexity": perplexity, "standard_error": error, "tokens": len(scored), "window": window,
    }  # fmt: skip
    if against is not None:
        record["against"] = compared(scored, _scored(against, tokens, window, options, num_tops))
    if as_json:
        print(json.dumps(record))
        return
    print(f"perplexity {perplexity:.4f} +- {error:.4f} over {len(scored)} tokens, window {window}")
    if against is not None:
        print(
            "against {perplexity:.4f}: ratio {ratio:.4f} +- {ratio_error:.4f}, the same most probable token at"
            " {same_top:.1%}".format(**record["against"])
        )


def _tokens_of_text(model: str, text: str, mmproj: str) -> list[int]:
    from realizar.tokenizer.load import load_tokenizer

    return load_tokenizer(fetch_model(model, mmproj=mmproj)).encode(text, parse_special=False)


def _scored(model: str, tokens: list[int], window: int, options: EngineOptions, num_tops: int) -> list[TokenLogprobs]:
    """All tokens but the first, each with the most probable ones in its place."""
    found: list[TokenLogprobs] = []
    with load_model(model, options) as llm:
        for start, first in windows(len(tokens), window):
            scored = llm.score(tokens[start : start + window], num_tops)
            found += [entry for entry in scored[first - start :] if entry is not None]
            if sys.stderr.isatty():
                print(f"\r{len(found)} of {len(tokens) - 1} tokens", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def compared(scored: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> dict[str, float]:
    """The other's perplexity, what the first one's is times it, and where both have the same most probable token."""
    pairs = list(zip(scored, other, strict=True))
    ratio, error = summary([theirs.logprob - ours.logprob for ours, theirs in pairs])
    return {
        "perplexity": summary([-entry.logprob for entry in other])[0],
        "ratio": ratio,
        "ratio_error": error,
        "same_top": sum(ours.top[0][0] == theirs.top[0][0] for ours, theirs in pairs) / len(pairs),
    }


def windows(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Starts of windows that overlap by half, each with its first scored position. Positions but 0 are scored once."""
    yield 0, 1
    step = size - size // 2
    for start in range(step, num_tokens - size + step, step):
        yield start, start - step + size


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


def tokenize_command(
    model: Model,
    text: Annotated[str | None, Parameter(help="Text to tokenize, unless --input is given.")] = None,
    /,
    *,
    lines_in: InputLines | None = None,
    lines_out: OutputLines = Path("-"),
    add_special: Annotated[bool, Parameter(help="Add the model's BOS and EOS tokens.")] = True,
    parse_special: Annotated[bool, Parameter(help="Parse texts like <|im_start|> as special tokens.")] = True,
    as_json: Json = False,
) -> None:
    """Tokenize a text, or JSON lines: {"text": ...} gives {"tokens": [...]}."""
    from realizar.tokenizer.load import load_tokenizer

    if (text is None) == (lines_in is None):
        raise InvalidRequestError("tokenize needs either a text or --input")
    if lines_in is None and lines_out != Path("-"):
        raise InvalidRequestError("--output needs --input; the tokens of a text go to stdout")
    tokenizer = load_tokenizer(fetch_model(model))
    if lines_in is None:
        tokens = tokenizer.encode(text or "", add_special=add_special, parse_special=parse_special)
        print(json.dumps({"tokens": tokens}) if as_json else " ".join(map(str, tokens)))
        return
    with _json_lines_writer(lines_out) as output:
        for place, line in _read_json_lines(lines_in):
            tokens = tokenizer.encode(_text_of(place, line), add_special=add_special, parse_special=parse_special)
            output.write(json.dumps({"tokens": tokens}) + "\n")


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate the objects of a JSON lines file without blank lines, each with its place (`in.jsonl:3`) for messages.

    It raises InvalidRequestError if a line is not a JSON object, or not UTF-8.
    """
    name = "stdin" if str(path) == "-" else str(path)
    source = nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
    with source as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{place}: the line is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise InvalidRequestError(f"{place}: the line is not a JSON object")
            yield place, value


def _text_of(place: str, line: dict[str, Any]) -> str:
    """The line's `text`. It raises InvalidRequestError if that is missing, no string, or holds a lone surrogate."""
    text = line.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}: the line has no string `text`", "text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place}: `text` has a lone surrogate at {error.start}", "text") from error
    return text


def _tokens_of(place: str, line: dict[str, Any]) -> list[int] | None:
    """The line's `tokens`, or None if it has none. It raises InvalidRequestError if they are not a list of integers."""
    tokens = line.get("tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequestError(f"{place}: `tokens` is not a list of integers", "tokens")
    return tokens


def _json_lines_writer(path: Path) -> AbstractContextManager[TextIO]:
    """A text stream to write lines to; stdout for `-`."""
    return nullcontext(sys.stdout) if str(path) == "-" else path.open("w", encoding="utf-8", newline="\n")

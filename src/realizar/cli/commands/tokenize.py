"""`realizar tokenize` converts text to token ids. It needs only the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from realizar.cli.json_lines import json_lines_writer, read_json_lines, text_of
from realizar.cli.options.arguments import InputLines, Json, Model, OutputLines
from realizar.cli.terminal.progress import download_progress
from realizar.errors import InvalidRequestError


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
    from realizar.checkpoint.open import open_checkpoint
    from realizar.hub.pull import resolve
    from realizar.tokenizer.load import load_tokenizer

    if (text is None) == (lines_in is None):
        raise InvalidRequestError("tokenize needs either a text or --input")
    if lines_in is None and lines_out != Path("-"):
        raise InvalidRequestError("--output needs --input; the tokens of a text go to stdout")
    with download_progress() as progress:
        path = resolve(model, progress)
    tokenizer = load_tokenizer(open_checkpoint(path))
    if lines_in is None:
        tokens = tokenizer.encode(text or "", add_special=add_special, parse_special=parse_special)
        print(json.dumps({"tokens": tokens}) if as_json else " ".join(map(str, tokens)))
        return
    with json_lines_writer(lines_out) as output:
        for place, line in read_json_lines(lines_in):
            tokens = tokenizer.encode(text_of(place, line), add_special=add_special, parse_special=parse_special)
            output.write(json.dumps({"tokens": tokens}) + "\n")

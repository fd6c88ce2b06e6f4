"""`realizar run` answers one prompt. Text goes to stdout as it arrives, statistics to stderr."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.channel_text import ChannelText
from realizar.cli.options.arguments import Json, Model, Verbose, checked_text, read_text
from realizar.cli.options.chat_template import ChatTemplateFile, read_chat_template
from realizar.cli.options.engine import DraftOptions, EngineOptions
from realizar.cli.options.loading import load_model, loaded_lines
from realizar.cli.options.sampling import SamplingOptions
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import json_line, shown_answer
from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from realizar.engine.frontend.outputs import RequestOutput

_Prompt = Annotated[
    str | None,
    Parameter(name=("--prompt", "-p"), help="The prompt. Piped text is appended to it, or is the prompt by itself."),
]


def run_command(
    model: Model,
    /,
    prompt: _Prompt = None,
    *,
    prompt_file: Annotated[
        Path | None,
        Parameter(
            name=("--prompt-file", "--file", "-f"),
            allow_leading_hyphen=True,
            help="File whose text is appended to PROMPT, or is the prompt; - is stdin.",
        ),
    ] = None,
    raw: Annotated[
        bool, Parameter(negative=(), help="Complete the prompt as it stands, without a chat template.")
    ] = False,
    system: Annotated[str | None, Parameter(help="System message.")] = None,
    image: Annotated[
        tuple[Path, ...],
        Parameter(consume_multiple=False, negative=(), help="File of an image that the prompt is about; repeatable."),
    ] = (),
    chat_template: ChatTemplateFile = None,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), help="No statistics.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
    sampling: SamplingOptions | None = None,
    structured: _StructuredOptions | None = None,
    drafts: DraftOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Answer a prompt and print the speed on stderr."""
    show_log(verbose)
    if raw:
        given = {"system": system, "image": image or None, "chat_template": chat_template}
        _refuse_with_raw([name for name, value in given.items() if value is not None])
    sampling = (sampling or SamplingOptions()).checked()
    grammar = (structured or _StructuredOptions()).chosen()
    template = read_chat_template(chat_template)
    text = read_prompt(prompt, prompt_file)
    if not raw and not text.strip():
        raise InvalidRequestError("the prompt is empty", "prompt")
    with load_model(model, engine or EngineOptions(), drafts, chat=not raw, template=template) as llm:
        for line in [] if quiet or as_json else loaded_lines(llm, drafts):
            print(line, file=sys.stderr)
        params = replace(sampling.apply(llm.default_sampling), structured=grammar)
        with llm.stream(text, params) if raw else llm.chat_stream(_messages(system, text, image), params) as stream:
            if not as_json:
                texts: Iterator[str] = (delta.text for delta in stream)
                if not raw and llm.answer_format.in_channels:
                    texts = ChannelText(llm.answer_format, llm.tokenizer.answer_marks).texts(stream)
                show(texts, wrap=not raw)
            output = stream.result()
        if as_json:
            print(json_line(record(output)))
        elif not quiet:
            print(f"{statistics(output)}, loaded in {llm.capacity.load_s:.2f} s", file=sys.stderr)


def _refuse_with_raw(given: Sequence[str]) -> None:
    """Raise InvalidRequestError for the first option of those that need the chat template."""
    if given:
        option = given[0].replace("_", "-")
        raise InvalidRequestError(f"--{option} needs a chat template, which --raw does not use", given[0])


def _messages(system: str | None, prompt: str, images: Sequence[Path]) -> list[dict[str, Any]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, user_message(prompt, [{"type": "image", "image": path} for path in images])]


def user_message(text: str, images: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Images, which are parts of a message's content, come before the text."""
    return {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}


def show(deltas: Iterator[str], *, wrap: bool = True) -> None:
    """Print deltas as they arrive, and a final line break if they have none.

    `wrap` breaks lines between words on a terminal; a file or a pipe gets the text as it is.
    """
    wrapper = WordWrapper(lambda: get_terminal_size().columns) if wrap and sys.stdout.isatty() else None
    last = "\n"
    try:
        for delta in deltas:
            if delta:
                shown = shown_answer(delta)
                print(shown if wrapper is None else wrapper.feed(shown), end="", flush=True)
                last = delta[-1]
    finally:
        if wrapper is not None:
            print(wrapper.flush(), end="", flush=True)
    if last != "\n":
        print(flush=True)


def statistics(output: RequestOutput) -> str:
    drafts = output.drafts
    return (
        f"{output.num_generated_tokens} tokens at {output.decode_tokens_per_s:.1f} tok/s"
        f" (prompt: {len(output.prompt_token_ids)} tokens at {output.prompt_tokens_per_s:.1f} tok/s)"
        + (f", {drafts.accepted} of {drafts.drafted} drafts right" if drafts.drafted else "")
    )


def record(output: RequestOutput) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "text": choice.text,
        "tokens": list(choice.token_ids),
        "prompt_tokens": list(output.prompt_token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prefill_tokens_per_s": output.prompt_tokens_per_s,
        "decode_tokens_per_s": output.decode_tokens_per_s,
        "draft_tokens": output.drafts.drafted,
        "accepted_tokens": output.drafts.accepted,
    }


_MOST_CHARACTERS = 64 << 20
"""Longer than any context, and far less than the memory."""
_SILENCE_S = 2.0


def read_prompt(words: str | None, file: Path | None) -> str:
    """Join the words and the file's text or the piped text, with two line breaks between; `-` is stdin.

    If a file is given, piped input is not read. InvalidRequestError: a text is not UTF-8, not readable, or too long.
    """
    from_stdin = Path("-")
    if words == "-":
        if file is not None:
            raise InvalidRequestError("the prompt - can't be combined with --prompt-file", "prompt")
        words, file = None, from_stdin
    if file is None:
        added = _piped() if words is not None else _stdin()
    elif file == from_stdin:
        added = _stdin()
    else:
        added = _bounded(read_text(file, _MOST_CHARACTERS, "prompt_file"), str(file))
    return "\n\n".join(checked_text(text, "the prompt") for text in (words, added) if text)


def _stdin() -> str:
    if sys.stdin.isatty():
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
    return _bounded(sys.stdin.read(_MOST_CHARACTERS + 1), "stdin")


def _piped() -> str:
    """Read a pipe or a file on stdin; empty for a terminal, /dev/null and a closed stdin."""
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    if not select.select([descriptor], [], [], _SILENCE_S)[0]:
        print("stdin is read to its end and appended to the prompt (</dev/null skips it)", file=sys.stderr)
    return _stdin()


def _bounded(text: str, name: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRequestError(f"{name} has more than {_MOST_CHARACTERS >> 20} million characters", "prompt")
    return text


_MOST_GRAMMAR_CHARACTERS = 16 << 20
"""Limit of a file: longer than any allowed grammar, and far less than the memory."""


@Parameter(name="*", group="Structured output", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class _StructuredOptions:
    r"""Options of structured output: at most one grammar, which the answer follows to its end.

    Attributes:
        json_object: any JSON object.
        json_schema: JSON of this schema; @FILE reads it from a file.
        regex: text that matches all of this expression; \d, \w and \s are digits, letters and spaces of ASCII.
        grammar: text of this Lark grammar, whose \d, \w and \s are of all scripts; @FILE reads it from a file.
        choice: one of some texts; repeat the option for each.
    """

    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = ()

    def chosen(self) -> StructuredOutput | None:
        """The chosen grammar, or None.

        It raises InvalidRequestError if several are given, one is empty, or a file can't be read.
        """
        given: dict[str, StructuredOutput] = {}
        if self.json_object:
            given["--json-object"] = StructuredOutput("json_object")
        if self.json_schema is not None:
            given["--json-schema"] = StructuredOutput("json_schema", _text("--json-schema", self.json_schema))
        if self.regex is not None:
            given["--regex"] = StructuredOutput("regex", _filled("--regex", self.regex))
        if self.grammar is not None:
            given["--grammar"] = StructuredOutput("lark", _text("--grammar", self.grammar))
        if self.choice:
            choices = [_filled("--choice", choice) for choice in self.choice]
            given["--choice"] = StructuredOutput("choice", json.dumps(choices))
        if len(given) > 1:
            raise InvalidRequestError(f"{', '.join(given)} can't be combined", "structured")
        return next(iter(given.values()), None)


def _filled(option: str, value: str) -> str:
    if not value:
        raise InvalidRequestError(f"{option} is empty", "structured")
    return value


def _text(option: str, value: str) -> str:
    if not value.startswith("@"):
        return _filled(option, value)
    _filled(f"the file's name in {option} @FILE", value[1:])
    path = Path(value[1:])
    text = read_text(path, _MOST_GRAMMAR_CHARACTERS, "structured")
    if len(text) > _MOST_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(f"{path} has more than {_MOST_GRAMMAR_CHARACTERS} characters", "structured")
    return _filled(str(path), text)


# The lines of streamed text are broken between words instead of within them.

_TAB = 8
_FENCE = "```"


class WordWrapper:
    """Adds line breaks to streamed text before words that would not fit.

    A word is held back until it ends or is as long as a line, so the output lags by less than a word. Lines of fenced
    code stay as they are, so that they can be copied. Lines may break between any wide characters (Chinese, Japanese,
    Korean). `width` is called for each word, since windows are resized.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""
        self._word_columns = 0
        self._line_start = ""
        self._in_code = self._in_long_word = False

    def feed(self, text: str) -> str:
        return "".join(self._take(char) for char in text)

    def flush(self) -> str:
        return self._end_word()

    def _take(self, char: str) -> str:
        if len(self._line_start) < len(_FENCE) and char != "\n":
            self._line_start += char
        if char == "\n":
            shown = self._end_word() + char
            self._in_code ^= self._line_start == _FENCE
            self._column, self._line_start = 0, ""
            return shown
        if self._in_code:
            return char
        if char in " \t":
            shown = self._end_word()
            columns = 1 if char == " " else _TAB - self._column % _TAB
            if self._column + columns > self._width():
                return shown  # a blank at the margin would begin the next line
            self._column += columns
            return shown + char
        columns = _columns(char)
        if columns == 2:
            return self._end_word() + self._place(char, columns)
        self._word += char
        self._word_columns += columns
        if self._word_columns < self._width():
            return ""
        shown = self._place_word()  # as long as a line: the terminal breaks the rest of it
        self._in_long_word = True
        return shown

    def _end_word(self) -> str:
        shown = self._place_word()
        self._in_long_word = False
        return shown

    def _place_word(self) -> str:
        word, columns = self._word, self._word_columns
        self._word, self._word_columns = "", 0
        return self._place(word, columns) if word else ""

    def _place(self, text: str, columns: int) -> str:
        width = self._width()
        before = "\n" if self._column > 0 and self._column + columns > width and not self._in_long_word else ""
        self._column = (0 if before else self._column) + columns
        if self._column > width:
            self._column = (self._column - 1) % width + 1
        return before + text


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1

"""`realizar run` answers one prompt. Text goes to stdout as it arrives, statistics to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.channel_text import ChannelText
from realizar.cli.options.arguments import Json, Model, Verbose
from realizar.cli.options.chat_template import ChatTemplateFile, read_chat_template
from realizar.cli.options.engine import EngineOptions
from realizar.cli.options.loading import ForChat, load_model
from realizar.cli.options.prompt import read_prompt
from realizar.cli.options.sampling import SamplingOptions
from realizar.cli.options.structured import StructuredOptions
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import json_line, shown_answer
from realizar.cli.terminal.word_wrap import WordWrapper
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.engine.clients.engine_client import RequestStream
    from realizar.engine.llm import LLM
    from realizar.outputs import RequestOutput
    from realizar.sampling_params import SamplingParams


def run_command(
    model: Model,
    prompt: Annotated[
        str | None, Parameter(help="The prompt. Piped text is appended to it, or is the prompt by itself.")
    ] = None,
    /,
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
    chat_template: ChatTemplateFile = None,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), help="No statistics.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
    sampling: SamplingOptions | None = None,
    structured: StructuredOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Answer a prompt and print the speed on stderr."""
    show_log(verbose)
    if raw and system is not None:
        raise InvalidRequestError("--system needs a chat template, which --raw does not use", "system")
    if raw and chat_template is not None:
        raise InvalidRequestError("--chat-template can't be combined with --raw", "chat_template")
    sampling = (sampling or SamplingOptions()).checked()
    grammar = (structured or StructuredOptions()).chosen()
    chat = None if raw else ForChat(read_chat_template(chat_template))
    text = read_prompt(prompt, prompt_file)
    if not raw and not text.strip():
        raise InvalidRequestError("the prompt is empty", "prompt")
    with load_model(model, engine or EngineOptions(), chat=chat) as llm:
        if llm.device.kind == "cuda" and not (quiet or as_json):
            print(f"device: {llm.device.label}", file=sys.stderr)
        params = replace(sampling.apply(llm.default_sampling), structured=grammar)
        with _start(llm, text, params, system=system, raw=raw) as stream:
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


def _start(llm: LLM, prompt: str, params: SamplingParams, *, system: str | None, raw: bool) -> RequestStream:
    return llm.stream(prompt, params) if raw else llm.chat_stream(_messages(system, prompt), params)


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, {"role": "user", "content": prompt}]


def show(deltas: Iterator[str], *, wrap: bool = True) -> None:
    """Print deltas as they arrive, and a final line break if they have none.

    Args:
        wrap: break lines between words on a terminal; a file or a pipe gets the text as it is.
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
    """One line with the numbers of generated and prompt tokens, and their rates."""
    return (
        f"{output.num_generated_tokens} tokens at {output.decode_tokens_per_s:.1f} tok/s"
        f" (prompt: {len(output.prompt_token_ids)} tokens at {output.prompt_tokens_per_s:.1f} tok/s)"
    )


def record(output: RequestOutput) -> dict[str, Any]:
    """The answer and its figures for JSON."""
    choice = output.outputs[0]
    return {
        "text": choice.text,
        "tokens": list(choice.token_ids),
        "prompt_tokens": list(output.prompt_token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "prefill_tokens_per_s": output.prompt_tokens_per_s,
        "decode_tokens_per_s": output.decode_tokens_per_s,
    }

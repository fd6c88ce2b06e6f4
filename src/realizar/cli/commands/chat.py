"""`realizar chat`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.channel_text import ChannelText
from realizar.cli.chat_session import ChatSession
from realizar.cli.chat_window import ContextWindow, Message
from realizar.cli.commands.run import show, statistics
from realizar.cli.options.arguments import Model, Verbose, checked_text
from realizar.cli.options.chat_template import ChatTemplateFile, read_chat_template
from realizar.cli.options.engine import EngineOptions
from realizar.cli.options.loading import ForChat, load_model
from realizar.cli.options.sampling import SamplingOptions
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import error_line
from realizar.cli.terminal.show_markdown import renders_markdown, show_markdown
from realizar.errors import EngineDeadError, RealizarError

if TYPE_CHECKING:
    from realizar.cli.terminal.line_editor import LineEditor
    from realizar.engine.llm import LLM
    from realizar.outputs import RequestOutput
    from realizar.sampling_params import SamplingParams


def chat_command(
    model: Model,
    /,
    *,
    system: Annotated[str | None, Parameter(help="System message.")] = None,
    chat_template: ChatTemplateFile = None,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), help="No statistics.")] = False,
    no_markdown: Annotated[
        bool, Parameter(negative=(), help="Show answers as the model writes them; default without a terminal.")
    ] = False,
    no_history: Annotated[
        bool, Parameter(negative=(), help="Save no typed lines to the history file that the arrow keys read.")
    ] = False,
    verbose: Verbose = False,
    sampling: SamplingOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Talk to a model; /help lists the commands."""
    show_log(verbose)
    sampling = (sampling or SamplingOptions()).checked()
    chat = ForChat(read_chat_template(chat_template))
    with load_model(model, engine or EngineOptions(), chat=chat) as llm:
        if llm.device.kind == "cuda" and not quiet:
            _report(f"device: {llm.device.label}")
        form = llm.answer_format
        channels = ChannelText(form, llm.tokenizer.answer_marks) if form.in_channels else None
        speaker = _Speaker(llm, channels)
        window = ContextWindow(llm.max_request_tokens, lambda messages: len(llm.chat_tokens(messages)), _report)
        session = ChatSession(speaker.answer, sampling.apply(llm.default_sampling), system, window=window)
        if channels is not None:
            session.remembered = lambda: channels.content
        editor = _editor(keeps=not no_history)
        if editor is not None:
            _report("/help lists the commands; Ctrl-D quits.")
        shown = show_markdown if renders_markdown() and not no_markdown else show
        for line in _lines(editor, session):
            with keys_unseen():
                _handle(session, line, shown if session.asks(line) else show)
            if speaker.last is not None:
                if _hit_the_end(llm, speaker.last):
                    _report(f"(the answer was cut off: the context of {llm.max_request_tokens} tokens is full)")
                if not quiet:
                    _report(statistics(speaker.last))
            speaker.last = None
            if session.finished:
                return


def _editor(*, keeps: bool) -> LineEditor | None:
    """The editor of typed lines; None where stdin or stdout is no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    from realizar.cli.terminal.line_editor import LineEditor, LineHistory, history_path

    return LineEditor(LineHistory(history_path() if keeps else None))


def _report(line: str) -> None:
    shown = fill(line, get_terminal_size().columns) if sys.stderr.isatty() else line
    print(shown, file=sys.stderr, flush=True)


class _Speaker:
    """Answers with a model and keeps the last answer's figures.

    Attributes:
        last: the output of the last complete answer, until the caller resets it.
    """

    def __init__(self, llm: LLM, channels: ChannelText | None) -> None:
        self._llm, self._channels = llm, channels
        self.last: RequestOutput | None = None

    def answer(self, messages: list[Message], params: SamplingParams) -> Iterator[str]:
        with self._llm.chat_stream(messages, params) as stream:
            yield from (delta.text for delta in stream) if self._channels is None else self._channels.texts(stream)
            self.last = stream.result()


def _hit_the_end(llm: LLM, output: RequestOutput) -> bool:
    used = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    return output.outputs[0].finish_reason == "length" and used >= llm.max_request_tokens


def _handle(session: ChatSession, line: str, shown: Callable[[Iterator[str]], None]) -> None:
    """Show the answer or the result of a line. An error of one line does not end the conversation."""
    try:
        shown(session.handle(checked_text(line, "the line")))
    except EngineDeadError:
        raise
    except RealizarError as error:
        print(f"realizar: {error_line(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)


def _lines(editor: LineEditor | None, session: ChatSession) -> Iterator[str]:
    """Read the user's messages until end of file. A line that ends with a backslash continues on the next."""
    kept = ""
    while True:
        try:
            if editor is None:
                if sys.stdin.isatty():  # stdout is a pipe, which gets answers alone
                    print("... " if kept else "> ", end="", file=sys.stderr, flush=True)
                line = input()
            else:
                line = editor.read("" if kept else session.meter, continued=bool(kept))
        except EOFError:
            if editor is None and sys.stdin.isatty():
                print(file=sys.stderr)  # ends the prompt's line
            if kept:
                yield kept
            return
        except KeyboardInterrupt:
            kept = ""
            print(file=sys.stderr)
            continue
        if line.endswith("\\"):
            kept += line[:-1] + "\n"
        else:
            yield kept + line
            kept = ""


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Turn the terminal's echo off during the block; the next prompt gets the typed keys.

    Ctrl-C still works. The function has no effect if stdin is not a terminal.
    """
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):  # Windows; a stdin that is closed, a file or a pipe
        yield
        return
    changed = [*before]
    changed[3] &= ~(termios.ECHO | termios.ICANON)  # so that the prompt gets half a line too
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

"""`realizar chat`: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from realizar.cli.channel_text import ChannelText
from realizar.cli.commands.run import show, statistics, user_message
from realizar.cli.options.arguments import Model, Verbose, checked_text
from realizar.cli.options.chat_template import ChatTemplateFile, read_chat_template
from realizar.cli.options.engine import DraftOptions, EngineOptions
from realizar.cli.options.loading import load_model, loaded_lines
from realizar.cli.options.sampling import SamplingOptions, describe, parse_assignments
from realizar.cli.terminal.log_lines import show_log
from realizar.cli.terminal.printable import error_line
from realizar.errors import EngineDeadError, InvalidRequestError, RealizarError
from realizar.images.decode import Cut
from realizar.images.given import MAX_BYTES, EncodedImage, GivenImage, pictures_of
from realizar.sampling_params import SamplingParams
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

if TYPE_CHECKING:
    from realizar.cli.terminal.line_editor import LineEditor
    from realizar.engine.frontend.outputs import RequestOutput
    from realizar.engine.llm import LLM

Message = dict[str, Any]


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
    drafts: DraftOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Talk to a model; /help lists the commands."""
    from realizar.cli.terminal.markdown_stream import renders_markdown, show_markdown  # a help needs no rich

    show_log(verbose)
    sampling = (sampling or SamplingOptions()).checked()
    template = read_chat_template(chat_template)
    with load_model(model, engine or EngineOptions(), drafts, chat=True, template=template) as llm:
        for line in [] if quiet else loaded_lines(llm, drafts):
            _report(line)
        form = llm.answer_format
        channels = ChannelText(form, llm.tokenizer.answer_marks) if form.in_channels else None
        speaker = _Speaker(llm, channels)
        window = ContextWindow(llm.max_request_tokens, lambda messages: len(llm.chat_tokens(messages)), _report)
        session = ChatSession(speaker.answer, sampling.apply(llm.default_sampling), window, system)
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
    """Answers with a model and keeps the output of the last complete answer until the caller resets it."""

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


# A conversation and its commands, apart from the terminal that shows it.

HELP = """\
/help            this list
/system [TEXT]   set the system message, or drop it; the conversation starts over
/clear           start the conversation over
/retry           answer the last message again
/undo            take back the last message and its answer
/image [FILE]    show an image with the next message; without FILE, drop those that wait for it
/params [N=V]    show the sampling parameters, or set some: /params temperature=0.5 top_k=40
/save FILE       write the conversation as JSON
/load FILE       go on with a conversation that /save wrote
/quit            leave (also /exit, /bye and Ctrl-D)
A message whose first word is a path, or code such as //, is no command.
A line that ends with a backslash goes on; so does one after Escape and Enter. Pasted lines are one message.
Ctrl-C stops an answer."""

_SHOWN_CHARACTERS = 60
_COMMAND = re.compile(r"/(\w*)(?:[ \t]+(.*))?", re.DOTALL)
_OTHER_NAMES = {"exit": "quit", "bye": "quit"}

Answer = Callable[[list[Message], SamplingParams], Iterator[str]]


@dataclass
class ChatSession:
    """The messages of a conversation, and the effect of the user's lines on them.

    Attributes:
        answer: streams the text deltas of an answer to messages.
        params: sampling parameters of the next answer.
        window: the part of the conversation that the model still sees.
        finished: True once the user has quit.
        remembered: tells what of the last answer stays in the conversation; None is all of it.
    """

    answer: Answer
    params: SamplingParams
    window: ContextWindow
    system: str | None = None
    finished: bool = False
    remembered: Callable[[], str] | None = None
    _messages: list[Message] = field(default_factory=list)
    _images: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*self._system_messages(), *self._messages]

    @property
    def meter(self) -> str:
        """How full the context is, such as `512 of 8,192 tokens, 6 %`; empty where that is not known.

        An answer that filled the context is followed by the template's marks, which have no place there: it is full.
        """
        used, length = self.window.used(self._system_messages(), self._messages), self.window.context_length
        if used is None:
            return ""
        used = min(used, length)
        return f"{used:,} of {length:,} tokens, {used / length:.0%}".replace("%", " %")

    @staticmethod
    def asks(line: str) -> bool:
        command = _command_of(line)
        return bool(line.strip()) and (command is None or command[0] == "retry")

    def handle(self, line: str) -> Iterator[str]:
        """Handle a line, and iterate the text to show: deltas of an answer, or a command's result.

        If an answer is interrupted or fails before its first delta, its question is removed, with its images.
        Otherwise its beginning stays in the conversation. An invalid command raises InvalidRequestError; the
        conversation stays as it was.
        """
        command = _command_of(line)
        if command is not None:
            name, rest = command
            run = getattr(self, f"_command_{_OTHER_NAMES.get(name, name)}", None)
            if run is None or not name.isalpha():
                raise InvalidRequestError(f"/{name} is not a command; /help lists them")
            yield from run(rest)
        elif line.strip():
            before = list(self._messages)
            self._messages.append(user_message(line.strip(), self._images))
            self._images.clear()
            yield from self._answer(before)

    def _answer(self, before: list[Message]) -> Iterator[str]:
        """Answer the last message. The conversation is reset to `before` if the answer is empty."""
        said: list[str] = []
        try:
            shown, params = self.window.shown(self._system_messages(), self._messages, self.params)
            for delta in self.answer(shown, params):
                said.append(delta)
                yield delta
        finally:
            if said:
                content = "".join(said) if self.remembered is None else self.remembered()
                self._messages.append({"role": "assistant", "content": content})
            else:
                self._messages[:] = before

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _start_over(self) -> None:
        self._messages.clear()
        self._images.clear()
        self.window.clear()

    def _command_help(self, _rest: str) -> Iterator[str]:
        yield HELP

    def _command_clear(self, _rest: str) -> Iterator[str]:
        self._start_over()
        yield "(the conversation starts over)"

    def _command_system(self, rest: str) -> Iterator[str]:
        self.system = rest or None
        said = "system message set" if rest else "no system message"
        yield f"({said}; the conversation starts over)" if self._messages else f"({said})"
        self._start_over()

    def _command_retry(self, _rest: str) -> Iterator[str]:
        before = list(self._messages)
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise InvalidRequestError("/retry needs a question first")
        yield from self._answer(before)

    def _command_image(self, rest: str) -> Iterator[str]:
        if not rest:
            self._images.clear()
            yield "(the next message shows no image)"
            return
        part = _image_part(_dropped(rest))
        try:
            self.window.count([user_message("", [part])])  # raises where the model reads text only
        except RealizarError as error:
            raise InvalidRequestError(f"/image can't show {rest}: {error}") from None
        self._images.append(part)
        count = f"{len(self._images)} images" if self._images[1:] else "it"
        yield f"(the next message shows {count})"

    def _command_params(self, rest: str) -> Iterator[str]:
        if rest:
            self.params = parse_assignments(rest, self.params)
        yield describe(self.params)

    def _command_undo(self, _rest: str) -> Iterator[str]:
        asked = [place for place, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            raise InvalidRequestError("/undo needs a message first")
        taken = _text_of(self._messages[asked[-1]]).split("\n", 1)[0]
        del self._messages[asked[-1] :]
        yield f"(taken back: {taken[:_SHOWN_CHARACTERS]})"

    def _command_save(self, rest: str) -> Iterator[str]:
        if not rest:
            raise InvalidRequestError("/save needs the name of a file")
        _write_chat(rest, self.messages)
        yield f"(saved {len(self.messages)} messages to {rest})"

    def _command_load(self, rest: str) -> Iterator[str]:
        if not rest:
            raise InvalidRequestError("/load needs the name of a file")
        system, messages = _read_chat(rest)
        self._start_over()
        self.system = system
        self._messages.extend(messages)
        hint = "; /retry answers the last one" if messages and messages[-1]["role"] == "user" else ""
        yield f"(loaded {len(self.messages)} messages from {rest}{hint})"

    def _command_quit(self, _rest: str) -> Iterator[str]:
        self.finished = True
        yield from ()


def _command_of(line: str) -> tuple[str, str] | None:
    """The name and the rest of a command; None for a message, such as a path, or pasted code that begins with `/*`."""
    found = _COMMAND.fullmatch(line.strip())
    return None if found is None else (found[1], (found[2] or "").strip())


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def _dropped(name: str) -> str:
    """The name of a file that a terminal wrote in quotes or with backslashes, as of one that is dropped on it."""
    with suppress(OSError, ValueError):
        words = [] if Path(name).exists() else shlex.split(name)
        if len(words) == 1:
            return words[0]
    return name


def _image_part(name: str) -> dict[str, Any]:
    """The part of a message that shows a file, with its bytes: files of conversations have them too.

    It raises InvalidRequestError if it can't be read, or is no image of a known format within the bounds, or torn.
    """
    image = _whole(GivenImage(name, _read_bytes("/image", name, MAX_BYTES)))
    url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _whole(given: GivenImage) -> EncodedImage:
    """An image whose pixels were decoded, to see that they can be. Raises as `GivenImage.open` and `pictures_of`."""
    image = given.open()
    pictures_of(image, Cut(((1, 1),)))
    return image


# Conversations in files, as `/save` writes them and `/load` reads them.

_MOST_BYTES = 256 << 20
_MOST_VALUES = 1 << 20
_ROLES = ("system", "user", "assistant")


def _write_chat(name: str, messages: Sequence[Message]) -> None:
    """Write messages as a JSON object with the key `messages`, over a file that is a conversation if there is one.

    It raises InvalidRequestError if the file can't be written, is something else, or could not be read again.
    """
    _check_replaceable(name)
    text = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1)
    data = f"{text}\n".encode(errors="replace")
    if len(data) > _MOST_BYTES:
        raise InvalidRequestError(f"the conversation takes {len(data)} bytes; a file may have {_MOST_BYTES}")
    try:
        Path(name).expanduser().write_bytes(data)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"/save can't write {name}: {_reason(error)}") from error


def _check_replaceable(name: str) -> None:
    try:
        size = Path(name).expanduser().stat().st_size
    except (OSError, RuntimeError, ValueError):
        return  # it is not there, or writing it says why that can't be done
    if size:
        try:
            _read_chat(name)
        except InvalidRequestError:
            raise InvalidRequestError(f"{name} is there and is no conversation; /save it to another file") from None


def _read_chat(name: str) -> tuple[str | None, list[Message]]:
    """Read the system message, or None, and the other messages of a file: that of `/save`, or a list of messages.

    It raises InvalidRequestError if the file can't be read, or holds something other than messages of text and images.
    """
    data = _read_bytes("/load", name, _MOST_BYTES)
    if len(data) > _MOST_BYTES or is_too_large(data, _MOST_VALUES, _MOST_VALUES):
        raise InvalidRequestError(f"{name} is too large for a conversation")
    try:
        value = parse_strictly(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 at byte {error.start}") from error
    except StrictJSONError as error:
        place = "" if error.position is None else f" at character {error.position}"
        raise InvalidRequestError(f"{name} is not JSON{place}: {error}") from error
    listed = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise InvalidRequestError(f"{name} holds no list of messages")
    messages = [_message(item, f"message {number} of {name}") for number, item in enumerate(listed, start=1)]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    for number, message in enumerate(messages, start=1 if system is None else 2):
        if message["role"] == "system":
            raise InvalidRequestError(f"message {number} of {name} has the role system, which only the first may have")
    return system, messages


def _message(item: Any, place: str) -> Message:
    """A checked message of a file. It raises InvalidRequestError if it is not a message, or has no text."""
    role = item.get("role") if isinstance(item, dict) else None
    if role not in _ROLES:
        raise InvalidRequestError(f"{place} has no role of {', '.join(_ROLES)}")
    content = item.get("content")
    if role == "user" and isinstance(content, list):
        return {"role": role, "content": [_part(part, place) for part in content]}
    if not isinstance(content, str):
        raise InvalidRequestError(f"{place} has no content that is text")
    return {"role": role, "content": checked_text(content, place)}


def _part(item: Any, place: str) -> dict[str, Any]:
    """A checked part of a user's content: text, or an image as `/image` makes it."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "text" and isinstance(item.get("text"), str):
        return {"type": kind, "text": checked_text(item["text"], place)}
    if kind == "image_url" and isinstance(item.get(kind), dict) and isinstance(url := item[kind].get("url"), str):
        _whole(GivenImage(f"an image of {place}", url=url))
        return {"type": kind, kind: {"url": url}}
    raise InvalidRequestError(f"{place} has no content that is text, or parts of text and images")


def _read_bytes(command: str, name: str, most: int) -> bytes:
    """A file's bytes, one more than the most if it has more. InvalidRequestError names the command."""
    try:
        with Path(name).expanduser().open("rb") as file:
            return file.read(most + 1)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"{command} can't read {name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# The part of a long conversation that the model sees.

_ROOM = 4
"""At least a quarter of the context is kept free for the answer."""
_KEPT = 2
"""Once messages are dropped, the conversation takes at most half of the context.

If it dropped only as much as it must, it would drop a turn with each answer, and lose the cached prefix each time.
"""


class ContextWindow:
    """Drops the oldest turns of a conversation that outgrows the context, and reports it by `notice`.

    `context_length` is of prompt and answer; `count` counts the tokens of a prompt made of messages.
    """

    def __init__(
        self, context_length: int, count: Callable[[list[Message]], int], notice: Callable[[str], None]
    ) -> None:
        self.context_length = context_length
        self.count, self._notice = count, notice
        self._first = 0

    def clear(self) -> None:
        self._first = 0

    def used(self, system: Sequence[Message], messages: Sequence[Message]) -> int | None:
        """Tokens of what the model would see now; None where the template refuses it."""
        if not messages:
            return 0
        try:
            return self.count([*system, *messages[self._first if self._first < len(messages) else 0 :]])
        except RealizarError:
            return None

    def shown(
        self, system: Sequence[Message], messages: Sequence[Message], params: SamplingParams
    ) -> tuple[list[Message], SamplingParams]:
        """The messages that the model sees, including the last one, and sampling that ends within the context.

        It raises RealizarError if the template refuses the messages.
        """
        if self._first >= len(messages):  # messages that it had dropped were taken back
            self._first = 0
        room = min(params.max_tokens or self.context_length, self.context_length // _ROOM)
        shown = [*system, *messages[self._first :]]
        tokens = self.count(shown)
        if tokens + room > self.context_length:
            shown, tokens = self._shortened(system, messages, tokens)
        left = self.context_length - tokens
        if params.max_tokens is not None and 0 < left < params.max_tokens:
            params = replace(params, max_tokens=left, min_tokens=min(params.min_tokens, left))
        return shown, params

    def _shortened(
        self, system: Sequence[Message], messages: Sequence[Message], tokens: int
    ) -> tuple[list[Message], int]:
        before = self._first
        for first in range(before + 1, len(messages)):
            if messages[first]["role"] == "user":  # templates want a question first
                self._first = first
                tokens = self.count([*system, *messages[first:]])
                if tokens <= self.context_length // _KEPT:
                    break
        if self._first > before:
            self._notice(
                f"(the conversation outgrew the context of {self.context_length} tokens: the model no longer sees its"
                f" first {self._first} messages; /clear starts over, /save keeps all)"
            )
        return [*system, *messages[self._first :]], tokens

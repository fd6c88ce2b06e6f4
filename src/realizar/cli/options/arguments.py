"""Parameters that several commands share. cyclopts and the nouns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token

from realizar.config import is_device
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from realizar.hub.pull import ListedModel


# Models that a shell completes: pulled names, short names, and GGUF files and folders.

_MOST_FILES = 200


def complete_model(context: CompletionContext) -> list[str]:
    """Names of models, and paths that go on from the typed word; hidden files are left out."""
    return [*(model.name for model in _models()), *_paths(context.incomplete)]


def _complete_pulled_model(_context: CompletionContext) -> list[str]:
    return [model.name for model in _models() if model.path is not None]


def _models() -> tuple[ListedModel, ...]:
    from realizar.hub.pull import list_models

    try:
        return list_models()
    except (RealizarError, OSError):
        return ()


def _paths(typed: str) -> Iterator[str]:
    """GGUF files, and folders with a slash at the end, whose paths begin with what is typed."""
    before, slash, name = typed.rpartition("/")
    folder = Path(before + slash).expanduser() if slash else Path()
    try:
        entries = sorted(folder.iterdir())
    except (OSError, RuntimeError, ValueError):
        return
    fitting = [entry for entry in entries if entry.name.startswith(name) and not entry.name.startswith(".")]
    for entry in fitting[:_MOST_FILES]:
        if entry.is_dir():
            yield f"{before}{slash}{entry.name}/"
        elif entry.suffix.lower() == ".gguf":
            yield f"{before}{slash}{entry.name}"


def exact_integer(_type: Any, tokens: Sequence[Token]) -> int:
    """Convert a whole number. cyclopts' own converter would round 1.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value} is not a whole number") from None


def at_least(least: int, name: str, value: int) -> int:
    """Check a count from the command line, and return it. InvalidRequestError: it is below `least`."""
    if value < least:
        raise InvalidRequestError(f"--{name} must be at least {least}, not {value}", name)
    return value


def refuse_given(options: Any, names: Iterable[str], reason: str) -> None:
    """InvalidRequestError, `--name reason`: one of these fields of some options is not what it is by default."""
    for field in fields(options):
        if field.name in names and getattr(options, field.name) != field.default:
            raise InvalidRequestError(f"--{field.name.replace('_', '-')} {reason}", field.name)


def checked_text(text: str, what: str) -> str:
    """Check a text from the command line or stdin, and return it.

    InvalidRequestError: the text was not UTF-8. Python keeps such bytes as lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{what} is not UTF-8 at character {error.start}") from error
    return text


def read_text(file: Path, most: int, param: str, failed: str = "") -> str:
    """The text of a file, or `most` + 1 of its characters: a device or a pipe may have no end.

    InvalidRequestError: it is not UTF-8, or, with `failed` before the reason, can't be read.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(most + 1)
    except OSError as error:
        raise InvalidRequestError(f"{failed}{file}: {error.strerror}", param) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file} is not UTF-8 at byte {error.start}", param) from error


def check_folder(file: Path | None) -> None:
    """Check before long work that its result can be written. InvalidRequestError: the file's folder does not exist."""
    if file is not None and not file.parent.is_dir():
        raise InvalidRequestError(f"{file} can't be written: the folder {file.parent} does not exist")


_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_in_bytes(_type: Any, tokens: Sequence[Token]) -> int:
    """Convert a size in bytes: a number, with a unit of 1,000 (`8G`, `8GB`) or of 1,024 (`8GiB`) if given."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B?|([KMGT])(iB?))", tokens[0].value.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{tokens[0].value} is not a size such as 8G, 512MB or 512MiB")
    base = 1024 if match.group(4) else 1000
    return int(float(match.group(1)) * base ** _POWERS[(match.group(2) or match.group(3) or "").upper()])


Model = Annotated[
    str,
    Parameter(
        help="A path, a pulled name (smollm2:135m) or a Hugging Face name (user/repo:Q4_K_M) or page.",
        completer=complete_model,
    ),
]
Models = Annotated[
    tuple[str, ...],
    Parameter(
        name=("--model",),
        negative=(),
        help="A path, a pulled name (smollm2:135m) or a Hugging Face name (user/repo:Q4_K_M). Several are loaded on"
        " first use, chosen by the model of a request.",
        completer=complete_model,
    ),
]
PulledModel = Annotated[str, Parameter(help="A name that `realizar list` shows.", completer=_complete_pulled_model)]
Verbose = Annotated[
    bool,
    Parameter(name=("--verbose", "-v"), negative=(), help="Say on stderr what runs, how, and why not otherwise."),
]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Write JSON to stdout.")]
InputLines = Annotated[
    Path, Parameter(name=("--input", "-i"), allow_leading_hyphen=True, help="JSON lines to read; - is stdin.")
]
OutputLines = Annotated[
    Path, Parameter(name=("--output", "-o"), allow_leading_hyphen=True, help="JSON lines to write; - is stdout.")
]
Integer = Annotated[int, Parameter(converter=exact_integer)]
Size = Annotated[int, Parameter(converter=size_in_bytes, show_default=format_bytes)]
MaybeSize = Annotated[int | None, Parameter(converter=size_in_bytes)]
MaybeInteger = Annotated[int | None, Parameter(converter=exact_integer)]


def _checked_device(_type: Any, tokens: Sequence[Token]) -> str:
    if not is_device(tokens[0].value):
        raise ValueError(f"{tokens[0].value} is not auto, cpu, cuda or cuda:N")
    return tokens[0].value


DeviceName = Annotated[str, Parameter(converter=_checked_device)]

"""Sources of the options of `serve`: the command line, then `REALIZAR_*` variables, then a TOML file, then defaults.

cyclopts calls `OptionSources` between reading the command line and converting values, so that a value is converted and
checked alike wherever it comes from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, Token
from cyclopts.argument import Argument

from realizar.cli.options.arguments import read_text
from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes

PREFIX = "REALIZAR_"
_MOST_CHARACTERS = 1 << 20  # of a file
_FILE, _PRINT = "config", "print-config"
_SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), "true"), **dict.fromkeys(("0", "false", "no", "off"), "false")}
_OF_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT(_\d+_(TCP|UDP)))(_\w+)?$")


@dataclass(frozen=True, slots=True)
class _Given:
    """Values of one option from one place: `label` names the place in errors, and `texts` are as on a command line."""

    label: str
    texts: list[str]


class OptionSources:
    """Adds the options that a command line leaves open from variables and from a file; for cyclopts' `config`."""

    def __init__(self) -> None:
        self._arguments: list[Argument] = []

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Give every argument without a token those of the first source that has some.

        InvalidRequestError: a name or a key is unknown, a value has the wrong form, or the file can't be read.
        """
        self._arguments = [argument for argument in arguments if not argument.children]
        names = _names(self._arguments)
        of_environment = _read_environment(os.environ, names)
        file = next((argument for argument in self._arguments if _main_name(argument) == _FILE), None)
        sources = [of_environment]
        if file is not None:
            _fill(file, of_environment.get(_FILE))
            if file.tokens:
                sources.append(_read_file(Path(file.tokens[-1].value), names))
        for source in sources:
            for argument in self._arguments:
                _fill(argument, source.get(_main_name(argument)))

    def lines(self) -> list[str]:
        """The options of the command line that was read last, as lines of a TOML file that say where each is from."""
        shown = [argument for argument in self._arguments if _main_name(argument) not in (_FILE, _PRINT)]
        return [_line(argument) for argument in shown]


def _main_name(argument: Argument) -> str:
    """An option's first name without hyphens, or the name of a positional argument, in small letters."""
    return argument.name.lstrip("-").lower()


def _names(arguments: Iterable[Argument]) -> dict[str, Argument]:
    """Every long name of an option, in the form of `_normal`."""
    names: dict[str, Argument] = {}
    for argument in arguments:
        long = [name for name in argument.names if name.startswith("--") or not name.startswith("-")]
        names.update({_normal(name.lstrip("-")): argument for name in long})
    del names[_normal(_PRINT)]
    return names


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _fill(argument: Argument, given: _Given | None) -> None:
    if given is None or argument.tokens:
        return
    for index, text in enumerate(given.texts):
        argument.append(Token(keyword=given.label, value=text, source=given.label, index=index))


def _read_environment(environment: Mapping[str, str], names: Mapping[str, Argument]) -> dict[str, _Given]:
    """Values of variables by option; an empty variable counts as none."""
    found: dict[str, _Given] = {}
    for variable in sorted(name for name in environment if name.startswith(PREFIX) and environment[name]):
        argument = names.get(_normal(variable.removeprefix(PREFIX)))
        value = environment[variable]
        if argument is None or value.startswith(("tcp://", "udp://")):
            raise InvalidRequestError(_unknown_variable(variable, names))
        _add(found, argument, variable, _texts_of_variable(argument, variable, value))
    return found


def _unknown_variable(variable: str, names: Mapping[str, Argument]) -> str:
    if _OF_KUBERNETES.match(variable.removeprefix(PREFIX)) or _normal(variable.removeprefix(PREFIX)) in names:
        return f"{variable} is set by Kubernetes for a Service named realizar: set enableServiceLinks: false"
    return f"{variable} names no option of serve{_nearest(variable, [PREFIX + name.upper() for name in names])}"


def _texts_of_variable(argument: Argument, variable: str, value: str) -> list[str]:
    if _is_switch(argument):
        if value.lower() not in _SWITCH:
            raise InvalidRequestError(f"{variable} must be true or false, not {value!r}")
        return [_SWITCH[value.lower()]]
    if not _may_repeat(argument):
        return [value]
    if not value.startswith('["'):
        return [text for part in value.split(",") if (text := part.strip())]
    try:
        return _texts(argument, variable, tomllib.loads(f"values = {value}")["values"])
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{variable} is no array of TOML: {error}") from error


def _read_file(path: Path, names: Mapping[str, Argument]) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    for key, value in _load(path).items():
        argument = names.get(_normal(key))
        if isinstance(value, dict):
            raise InvalidRequestError(f"{path}: [{key}] is a table, but options stand at the top of the file")
        if argument is None:
            known = [name.replace("_", "-") for name in names if name != _FILE]
            raise InvalidRequestError(f"{path}: {key} names no option of serve{_nearest(key, known)}")
        if _main_name(argument) == _FILE:
            raise InvalidRequestError(f"{path}: a configuration file can't name another one")
        _add(found, argument, f"{path}: {key}", _texts(argument, f"{path}: {key}", value))
    return found


def _load(path: Path) -> dict[str, Any]:
    content = read_text(path, _MOST_CHARACTERS, _FILE, "--config can't read ")
    if len(content) > _MOST_CHARACTERS:
        limit = format_bytes(_MOST_CHARACTERS)
        raise InvalidRequestError(f"{path} is larger than the {limit} of a configuration file")
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequestError(f"{path} is not valid TOML: {error}") from error
    except RecursionError:
        raise InvalidRequestError(f"{path} is nested too deeply") from None


def _texts(argument: Argument, label: str, value: Any) -> list[str]:
    if _is_switch(argument):
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{label} must be true or false, not {value!r}")
        return [str(value).lower()]
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not _may_repeat(argument):
        raise InvalidRequestError(f"{label} takes one value, not an array")
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise InvalidRequestError(f"{label} must be a text or a number, not {json.dumps(each, default=str)}")
        if "\x00" in str(each):  # no command line can have it, and no path may
            raise InvalidRequestError(f"{label} must not have the character U+0000")
    return [str(each) for each in values]


def _add(found: dict[str, _Given], argument: Argument, label: str, texts: list[str]) -> None:
    name = _main_name(argument)
    if name in found:
        raise InvalidRequestError(f"{found[name].label} and {label} are names of the same option")
    found[name] = _Given(label, texts)


def _is_switch(argument: Argument) -> bool:
    return bool(argument.token_count()[0] == 0)


def _may_repeat(argument: Argument) -> bool:
    return bool(argument.token_count()[1])


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _line(argument: Argument) -> str:
    """`name = value  # where it is from`; an option that is left open is a comment."""
    name = _main_name(argument)
    if not argument.tokens:
        default = argument.field_info.default
        open_ = default is None or default is argument.field_info.empty
        return f"# {name} is left open" if open_ else f"{name} = {_toml(default)}  # default"
    token = argument.tokens[0]
    label = (token.keyword or argument.name) if token.source == "cli" else token.source
    return f"{name} = {_toml(argument.value)}  # {label}"


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

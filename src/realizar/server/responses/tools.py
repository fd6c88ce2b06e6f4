"""Tools of the Responses API, read as a `ToolPlan`.

Codex puts functions into namespaces. A template knows none, so such a function is shown as `namespace__name`.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.server.errors import refused, unsupported
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools
from realizar.server.http.unknown_fields import known_only

_LOG = logging.getLogger(__name__)
_SEPARATOR = "__"
_FUNCTION = (
    *("type", "name", "description", "parameters", "strict"),
    *("output_schema", "allowed_callers", "defer_loading", "async"),
)
_CUSTOM = ("type", "name", "description", "format", "allowed_callers", "defer_loading", "async")
_NAMESPACE = ("type", "name", "description", "tools")
_OWN_TOOLS = "the server runs no tools of its own"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request.

    Attributes:
        plan: what may be called, by the names that the template shows.
        namespaces: the namespace and the name of each function that has a namespace, by the name that is shown.
        custom: names of tools whose input is text.
        shown: the tools as the response object repeats them.
    """

    plan: ToolPlan
    namespaces: Mapping[str, tuple[str, str]]
    custom: frozenset[str]
    shown: Sequence[Mapping[str, Any]]


def full_name(namespace: str | None, name: str) -> str:
    """The name that the template shows."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def read_tools(
    given: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, *, parallel: bool
) -> ResponseTools:
    """Read a request's `tools` and `tool_choice`. Raises ApiError: 400; `param` is the path."""
    check_num_tools(given or ())
    found = list(_functions(given or ()))
    check_num_tools(found)
    tools = tuple(function.converted for function in found)
    paths = [function.path for function in found]
    check_functions(tools, lambda place: f"{paths[place]}.name", lambda place: f"{paths[place]}.parameters")
    namespaces = {
        full_name(each.namespace, each.name): (each.namespace, each.name)
        for each in found
        if each.namespace is not None
    }
    custom = frozenset(each.name for each in found if each.is_custom)
    plan = _planned(tools, custom, choice, parallel=parallel)
    return ResponseTools(plan, namespaces, custom, _repeated(given or ()))


@dataclass(frozen=True, slots=True)
class _Function:
    path: str
    namespace: str | None
    name: str
    converted: Mapping[str, Any]
    is_custom: bool = False


def _functions(given: Sequence[dict[str, Any]]) -> Iterator[_Function]:
    for place, tool in enumerate(given):
        path = f"tools[{place}]"
        kind = tool.get("type")
        if kind == "function":
            yield _function(path, tool)
        elif kind == "custom":
            yield _custom(path, tool)
        elif kind == "namespace":
            yield from _in_namespace(path, tool)
        elif kind == "web_search" and tool.get("external_web_access") is False:
            _log_once()
        else:
            raise unsupported(f"{path}.type", f"{ascii(kind)[:40]} is not supported: {_OWN_TOOLS}")


@functools.cache
def _log_once() -> None:
    """Say that a tool is left out. Codex sends it with each request unless its configuration turns it off."""
    _LOG.info("tools of type web_search without access to the web are left out: %s", _OWN_TOOLS)


def _in_namespace(path: str, tool: dict[str, Any]) -> Iterator[_Function]:
    known_only(path, tool, _NAMESPACE)
    name, functions = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise refused(f"{path}.name must be text", f"{path}.name")
    if not isinstance(tool.get("description"), str | None):
        raise refused(f"{path}.description must be text", f"{path}.description")
    if not isinstance(functions, list):
        raise refused(f"{path}.tools must be a list", f"{path}.tools")
    for place, function in enumerate(functions):
        where = f"{path}.tools[{place}]"
        if not isinstance(function, dict) or function.get("type") != "function":
            raise unsupported(f"{where}.type", "must be 'function'")
        yield _function(where, function, name)


def _function(path: str, tool: dict[str, Any], namespace: str | None = None) -> _Function:
    known_only(path, tool, _FUNCTION)
    for field, kind, words in (("name", str, "text"), ("description", str | None, "text")):
        if not isinstance(tool.get(field), kind):
            raise refused(f"{path}.{field} must be {words}", f"{path}.{field}")
    for field in ("parameters", "output_schema"):
        if not isinstance(tool.get(field), dict | None):
            raise refused(f"{path}.{field} must be an object", f"{path}.{field}")
    for field in ("strict", "defer_loading", "async"):
        if not isinstance(tool.get(field), bool | None):
            raise refused(f"{path}.{field} must be true or false", f"{path}.{field}")
    for field, reason in (("defer_loading", "all tools are shown"), ("async", "calls are answered in turn")):
        if tool.get(field):
            raise unsupported(f"{path}.{field}", f"must be false: {reason}")
    if tool.get("allowed_callers") not in (None, ["direct"]):
        raise unsupported(f"{path}.allowed_callers", "must be ['direct']: the model alone calls tools")
    function: dict[str, Any] = {"name": full_name(namespace, tool["name"])}
    for field in ("description", "parameters"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    if tool.get("strict"):
        function["strict"] = True
    return _Function(path, namespace, tool["name"], {"type": "function", "function": function})


def _custom(path: str, tool: dict[str, Any]) -> _Function:
    known_only(path, tool, _CUSTOM)
    form = tool.get("format")
    if form is not None:
        if not isinstance(form, dict):
            raise refused(f"{path}.format must be an object", f"{path}.format")
        if form.get("type") != "text":
            raise unsupported(f"{path}.format.type", "must be text: inputs follow no grammar")
        known_only(f"{path}.format", form, ("type",))
    given = {name: value for name, value in tool.items() if name != "format"}
    made = _function(path, {**given, "type": "function", "parameters": PARAMETERS, "strict": True})
    return _Function(path, None, made.name, made.converted, is_custom=True)


def _planned(
    tools: tuple[Mapping[str, Any], ...],
    custom: frozenset[str],
    choice: str | dict[str, Any] | None,
    *,
    parallel: bool,
) -> ToolPlan:
    if choice is None or choice == "auto":
        return ToolPlan(tools, parallel=parallel)
    if choice == "none":
        return ToolPlan()
    if choice == "required":
        if not tools:
            raise refused("tool_choice is 'required', but the request has no tools", "tool_choice")
        return ToolPlan(tools, required=True, parallel=parallel)
    if isinstance(choice, str):
        raise refused("tool_choice must be none, auto, required or an object", "tool_choice", "invalid_value")
    if choice.get("type") in ("function", "custom"):
        return ToolPlan(tools, name=_named(tools, custom, choice, "tool_choice")["function"]["name"], parallel=False)
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, custom, choice, parallel=parallel)
    raise unsupported("tool_choice.type", f"must be function, custom or allowed_tools: {_OWN_TOOLS}")


def _allowed(
    tools: Sequence[Mapping[str, Any]], custom: frozenset[str], choice: dict[str, Any], *, parallel: bool
) -> ToolPlan:
    known_only("tool_choice", choice, ("type", "mode", "tools"))
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise refused("tool_choice.mode must be auto or required", "tool_choice.mode", "invalid_value")
    if not isinstance(allowed, list) or not allowed:
        raise refused("tool_choice.tools must be a list that is not empty", "tool_choice.tools", "invalid_value")
    check_num_tools(allowed, "tool_choice.tools")
    named = [_named(tools, custom, each, f"tool_choice.tools[{place}]") for place, each in enumerate(allowed)]
    wanted = {tool["function"]["name"] for tool in named}
    kept = tuple(tool for tool in tools if tool["function"]["name"] in wanted)
    return ToolPlan(kept, required=mode == "required", parallel=parallel)


def _named(tools: Sequence[Mapping[str, Any]], custom: frozenset[str], choice: Any, path: str) -> Mapping[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("function", "custom"):
        raise unsupported(f"{path}.type", f"must be function or custom: {_OWN_TOOLS}")
    known_only(path, choice, ("type", "name", "namespace") if kind == "function" else ("type", "name"))
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str):
        raise refused(f"{path}.name must be text", f"{path}.name")
    if not isinstance(namespace, str | None):
        raise refused(f"{path}.namespace must be text", f"{path}.namespace")
    for tool in tools:
        if tool["function"]["name"] == full_name(namespace, name) and (name in custom) == (kind == "custom"):
            return tool
    raise refused(f"{path} names the tool {name[:80]!a}, which is not in tools", f"{path}.name", "invalid_value")


def _repeated(given: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools with the fields that clients expect in a response object."""
    empty = {"description": None, "parameters": None, "strict": False}
    return [{**empty, **tool} if tool.get("type") == "function" else tool for tool in given]


# Custom tools, whose input is plain text: the model sees each as a function with one argument, `input`.
#
# The function is strict, so that a whole call always has its text.

ARGUMENT = "input"
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string"}},
    "required": [ARGUMENT],
    "additionalProperties": False,
}
_LONGEST_ESCAPE = 12  # characters of a surrogate pair


def arguments_of(text: str) -> str:
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """The text of a call's arguments; of those that were cut off, as much as there is."""
    _, _, rest = arguments.partition(":")
    _, _, written = rest.partition('"')
    for cut in range(_LONGEST_ESCAPE):
        try:
            text, _ = json.JSONDecoder(strict=False).raw_decode(f'"{written[: max(len(written) - cut, 0)]}"')
        except ValueError:
            continue
        return str(text).encode("utf-8", "replace").decode()  # a pair's first half alone is no character
    return ""

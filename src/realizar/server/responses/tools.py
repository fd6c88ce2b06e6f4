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
from realizar.server.generation.conversation import log_once
from realizar.server.generation.objects import check_fields, checked, optional, text_in
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools, plan_allowed, plan_mode
from realizar.server.http.unknown_fields import known_only

_LOG = logging.getLogger(__name__)
_SEPARATOR = "__"
_FUNCTION = (
    *("type", "name", "description", "parameters", "strict"),
    *("output_schema", "allowed_callers", "defer_loading", "async"),
)
_CUSTOM = ("type", "name", "description", "format", "allowed_callers", "defer_loading", "async")
_NAMESPACE = ("type", "name", "description", "tools")
_KINDS = {
    "description": str,
    **dict.fromkeys(("parameters", "output_schema"), dict),
    **dict.fromkeys(("strict", "defer_loading", "async"), bool),
}
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
    check_functions(tools, [function.path for function in found], ".name", ".parameters")
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
            # Codex sends it with each request unless its configuration turns it off.
            log_once(_LOG, "tools of type web_search without access to the web are left out: %s", _OWN_TOOLS)
        else:
            raise unsupported(f"{path}.type", f"{ascii(kind)[:40]} is not supported: {_OWN_TOOLS}")


def _in_namespace(path: str, tool: dict[str, Any]) -> Iterator[_Function]:
    check_fields(path, tool, _NAMESPACE, _KINDS)
    name = text_in(path, tool, "name")
    for place, function in enumerate(checked(f"{path}.tools", tool.get("tools"), list)):
        where = f"{path}.tools[{place}]"
        if not isinstance(function, dict) or function.get("type") != "function":
            raise unsupported(f"{where}.type", "must be 'function'")
        yield _function(where, function, name)


def _function(path: str, tool: dict[str, Any], namespace: str | None = None) -> _Function:
    check_fields(path, tool, _FUNCTION, _KINDS)
    name = text_in(path, tool, "name", may_be_empty=True)
    for field, reason in (("defer_loading", "all tools are shown"), ("async", "calls are answered in turn")):
        if tool.get(field):
            raise unsupported(f"{path}.{field}", f"must be false: {reason}")
    if tool.get("allowed_callers") not in (None, ["direct"]):
        raise unsupported(f"{path}.allowed_callers", "must be ['direct']: the model alone calls tools")
    function: dict[str, Any] = {"name": full_name(namespace, name)}
    for field in ("description", "parameters"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    if tool.get("strict"):
        function["strict"] = True
    return _Function(path, namespace, name, {"type": "function", "function": function})


def _custom(path: str, tool: dict[str, Any]) -> _Function:
    known_only(path, tool, _CUSTOM)
    form = tool.get("format")
    if form is not None:
        if checked(f"{path}.format", form, dict).get("type") != "text":
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
    if not isinstance(choice, dict):
        return plan_mode(tools, choice, parallel=parallel)
    if choice.get("type") in ("function", "custom"):
        return ToolPlan(tools, name=_named(tools, custom, choice, "tool_choice"), parallel=False)
    if choice.get("type") == "allowed_tools":
        known_only("tool_choice", choice, ("type", "mode", "tools"))
        named = functools.partial(_named, tools, custom)
        return plan_allowed(tools, "tool_choice", choice, named, parallel=parallel)
    raise unsupported("tool_choice.type", f"must be function, custom or allowed_tools: {_OWN_TOOLS}")


def _named(tools: Sequence[Mapping[str, Any]], custom: frozenset[str], choice: Any, path: str) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("function", "custom"):
        raise unsupported(f"{path}.type", f"must be function or custom: {_OWN_TOOLS}")
    known_only(path, choice, ("type", "name", "namespace") if kind == "function" else ("type", "name"))
    name = text_in(path, choice, "name", may_be_empty=True)
    namespace = optional(f"{path}.namespace", choice.get("namespace"), str)
    shown = full_name(namespace, name)
    if shown not in (tool["function"]["name"] for tool in tools) or (name in custom) != (kind == "custom"):
        raise refused(f"{path} names the tool {name[:80]!a}, which is not in tools", f"{path}.name", "invalid_value")
    return shown


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

"""Tools of a chat request, and `tool_choice`, read as a `ToolPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from realizar.server.errors import refused, unsupported
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools
from realizar.server.http.unknown_fields import known_only
from realizar.server.openai.records import ChatCompletionRequest, FunctionDefinition, Tool


def check_tools(given: Sequence[Tool] | None) -> tuple[Mapping[str, Any], ...]:
    """Check the tools of a request and convert them for the template.

    Raises:
        ApiError: 400; `param` is the path.
    """
    if given is None:
        return ()
    check_num_tools(given)
    for place, tool in enumerate(given):
        path = f"tools[{place}]"
        if tool.type != "function" or tool.custom is not None:
            raise unsupported(f"{path}.type", "must be 'function': other tools are not supported")
        if tool.function is None:
            raise refused(f"{path}.function is missing", f"{path}.function", "missing_required_parameter")
    tools = tuple(_plain(tool) for tool in given)
    check_functions(tools, "tools[{}].function.name".format, "tools[{}].function.parameters".format)
    return tools


def plan_tools(request: ChatCompletionRequest) -> ToolPlan:
    """Make the plan from a request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400; `param` is the path.
    """
    tools = check_tools(request.tools)
    parallel = request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None:
        return ToolPlan(tools, parallel=parallel)
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise refused("tool_choice must be none, auto, required or an object", "tool_choice", "invalid_value")
        if choice == "none":
            return ToolPlan()
        if choice == "auto":
            return ToolPlan(tools, parallel=parallel)
        if not tools:
            raise refused("tool_choice is 'required', but the request has no tools", "tool_choice", "invalid_value")
        return ToolPlan(tools, required=True, parallel=parallel)
    if choice.get("type") == "function":
        named = _named(tools, choice, "tool_choice", ("name",))
        return ToolPlan(tools, name=named["function"]["name"], parallel=False)
    if choice.get("type") == "allowed_tools":
        return _allowed(tools, choice, parallel)
    raise refused("tool_choice.type must be function or allowed_tools", "tool_choice.type", "invalid_value")


def _allowed(tools: Sequence[Mapping[str, Any]], choice: dict[str, Any], parallel: bool) -> ToolPlan:
    path = "tool_choice.allowed_tools"
    known_only("tool_choice", choice, ("type", "allowed_tools"))
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise refused(f"{path} must be an object with mode and tools", path, "invalid_value")
    known_only(path, allowed, ("mode", "tools"))
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise refused(f"{path}.mode must be auto or required", f"{path}.mode", "invalid_value")
    check_num_tools(allowed["tools"], f"{path}.tools")
    fields = FunctionDefinition.__struct_fields__  # a tool may be named by its whole definition
    named = [_named(tools, each, f"{path}.tools[{place}]", fields) for place, each in enumerate(allowed["tools"])]
    wanted = {tool["function"]["name"] for tool in named}  # one that is named twice is shown once
    kept = tuple(tool for tool in tools if tool["function"]["name"] in wanted)
    return ToolPlan(kept, required=mode == "required", parallel=parallel)


def _named(tools: Sequence[Mapping[str, Any]], choice: Any, path: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise refused(f"{path}.function.name is missing", f"{path}.function.name", "missing_required_parameter")
    known_only(path, choice, ("type", "function"))
    known_only(f"{path}.function", function, known)
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise refused(
        f"{path} names the tool {name[:80]!a}, which is not in tools", f"{path}.function.name", "invalid_value"
    )


def _plain(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        name: value
        for name, value in msgspec.to_builtins(tool.function).items()
        if value is not None and name != "cache_control"
    }
    return {"type": tool.type, "function": function}

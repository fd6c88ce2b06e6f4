"""Tools of Anthropic's Messages API, read as a `ToolPlan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realizar.server.anthropic.records import ToolChoice
from realizar.server.errors import refused, unsupported
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools
from realizar.server.http.unknown_fields import known_only

_WITHOUT_EFFECT = ("cache_control", "eager_input_streaming", "allowed_callers")
_KNOWN = ("type", "name", "description", "input_schema", "strict", *_WITHOUT_EFFECT)


def read_tools(given: Sequence[dict[str, Any]] | None, choice: ToolChoice | None) -> ToolPlan:
    """Make the plan from a request's `tools` and `tool_choice`.

    Raises:
        ApiError: 400; `param` is the path.
    """
    given = given or ()
    check_num_tools(given)
    tools = tuple(_converted(f"tools.{place}", tool) for place, tool in enumerate(given))
    check_functions(tools, "tools.{}.name".format, "tools.{}.input_schema".format)
    if choice is None:
        return ToolPlan(tools)
    if choice.type != "tool" and choice.name is not None:
        raise refused("tool_choice.name needs tool_choice.type to be tool", "tool_choice.name")
    if choice.type == "none":
        return ToolPlan()
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto":
        return ToolPlan(tools, parallel=parallel)
    if not tools:
        raise refused(f"tool_choice.type is '{choice.type}', but the request has no tools", "tool_choice")
    if choice.type == "any":
        return ToolPlan(tools, required=True, parallel=parallel)
    if choice.name not in (tool["function"]["name"] for tool in tools):
        raise refused("tool_choice.name must be the name of one of tools", "tool_choice.name")
    return ToolPlan(tools, name=choice.name, parallel=False)


def _converted(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates take."""
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", "must be 'custom': the server runs no tools of its own")
    known_only(where, tool, _KNOWN if tool.get("defer_loading") else (*_KNOWN, "defer_loading"))
    name, schema, description = tool.get("name"), tool.get("input_schema"), tool.get("description")
    if not isinstance(name, str):
        raise refused(f"{where}.name must be text", f"{where}.name")
    if not isinstance(schema, dict):
        raise refused(f"{where}.input_schema must be an object", f"{where}.input_schema")
    if not isinstance(description, str | None):
        raise refused(f"{where}.description must be text", f"{where}.description")
    if not isinstance(tool.get("strict"), bool | None):
        raise refused(f"{where}.strict must be true or false", f"{where}.strict")
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if description is not None:
        function["description"] = description
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}

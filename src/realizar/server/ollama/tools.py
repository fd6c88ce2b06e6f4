"""Tools of Ollama's `/api/chat`, read as a `ToolPlan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realizar.server.errors import refused, unsupported
from realizar.server.generation.tools import ToolPlan, check_functions, check_num_tools
from realizar.server.http.unknown_fields import known_only

_KNOWN = ("type", "function")
_OF_FUNCTION = ("name", "description", "parameters", "strict")


def read_tools(given: Sequence[dict[str, Any]] | None) -> ToolPlan:
    """Make the plan from a request's `tools`.

    Raises:
        ApiError: 400; `param` is the path.
    """
    given = given or ()
    check_num_tools(given)
    tools = tuple(_converted(f"tools[{place}]", tool) for place, tool in enumerate(given))
    check_functions(tools, "tools[{}].function.name".format, "tools[{}].function.parameters".format)
    return ToolPlan(tools)


def _converted(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form that chat templates take. Clients write what they leave out as null."""
    if tool.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", "must be 'function': other tools are not supported")
    known_only(where, tool, _KNOWN)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refused(f"{where}.function must be an object", f"{where}.function")
    where = f"{where}.function"
    function = {key: value for key, value in function.items() if value is not None}
    known_only(where, function, _OF_FUNCTION)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str):
        raise refused(f"{where}.name must be text", f"{where}.name")
    if not isinstance(description, str | None):
        raise refused(f"{where}.description must be text", f"{where}.description")
    if not isinstance(parameters, dict | None):
        raise refused(f"{where}.parameters must be an object", f"{where}.parameters")
    if not isinstance(function.get("strict"), bool | None):
        raise refused(f"{where}.strict must be true or false", f"{where}.strict")
    return {"type": "function", "function": function}

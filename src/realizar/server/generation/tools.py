"""`ToolPlan`: the tool calls that a request allows; and the checks of tools that all dialects share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from realizar.errors import InvalidRequestError
from realizar.server.errors import refused
from realizar.tokenizer.parsers.grammar import tool_of_rule

T = TypeVar("T")

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The tool calls that a request allows.

    Attributes:
        tools: tools that may be called, in the form that chat templates take (OpenAI's); empty if no call is wanted.
        required: one of them must be called. name: the one that must be called.
        parallel: several calls are allowed.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    required: bool = False
    name: str | None = None
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.required or self.name is not None

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """The tools in the form that the template shows, without the field `strict`, which the model does not need."""
        return shown_tools(self.tools)


@contextmanager
def naming_tools(plan: ToolPlan) -> Iterator[None]:
    """Name the tool, in place of its rule in the grammar, in errors about a schema that can't be enforced."""
    try:
        yield
    except InvalidRequestError as error:
        # Without tools the grammar is the client's own, and its rules have any names.
        found = re.match(r"the JSON schema of the rule (\w+)", str(error)) if plan.tools else None
        name = None if found is None else tool_of_rule(found[1], plan.tools, plan.name)
        if found is None or name is None:
            raise
        message = f"the parameters of the tool {name!r}{str(error)[found.end() :]}"
        raise type(error)(message, "tools") from None


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Checked tools in the form that the template shows; None if there are none."""
    return [_without_strict(tool) for tool in tools] or None


def check_num_tools(given: Sequence[object], where: str = "tools") -> None:
    """Raise ApiError (400) for too many tools in a list, whose path is `where`, or too many of their names."""
    if len(given) > MAX_TOOLS:
        raise refused(f"{where} has {len(given)} entries; at most {MAX_TOOLS} are allowed", where, "array_too_long")


def read_functions(
    given: Sequence[T] | None,
    path: str,
    convert: Callable[[str, T], dict[str, Any]],
    name: str = ".function.name",
    schema: str = ".function.parameters",
) -> tuple[dict[str, Any], ...]:
    """The tools of a request in the form that chat templates take, each made by `convert`, and checked.

    `path` is a tool's in the request, with `{}` for its place; `name` and `schema` are those of its fields behind it.
    Raises ApiError: 400; `param` is the path.
    """
    check_num_tools(given or ())
    paths = [path.format(place) for place in range(len(given or ()))]
    tools = tuple(map(convert, paths, given or ()))
    check_functions(tools, paths, name, schema)
    return tools


def check_functions(tools: Sequence[Mapping[str, Any]], paths: Sequence[str], name: str, schema: str) -> None:
    """Check the names of converted tools, and that the arguments of each are an object; as `read_functions` does."""
    seen: set[str] = set()
    for where, tool in zip(paths, tools, strict=True):
        path, function = f"{where}{name}", tool["function"]
        if not _NAME.fullmatch(function["name"]):
            raise refused(f"{path} must be 1 to 64 letters, digits, _ or -", path, "invalid_value")
        if function["name"] in seen:
            raise refused(f"{path}: two tools have the name '{function['name']}'", path)
        seen.add(function["name"])
        if function.get("parameters", {}).get("type", "object") != "object":
            path = f"{where}{schema}.type"
            raise refused(f"{path} must be 'object'", path, "invalid_value")


def plan_mode(tools: tuple[Mapping[str, Any], ...], mode: str | None, *, parallel: bool) -> ToolPlan:
    """The plan of a `tool_choice` that is none, auto, as null is too, or required.

    Raises ApiError: 400; it is another, or required without tools.
    """
    if mode is None or mode == "auto":
        return ToolPlan(tools, parallel=parallel)
    if mode == "none":
        return ToolPlan()
    if mode != "required":
        raise refused("tool_choice must be none, auto, required or an object", "tool_choice", "invalid_value")
    if not tools:
        raise refused("tool_choice is 'required', but the request has no tools", "tool_choice", "invalid_value")
    return ToolPlan(tools, required=True, parallel=parallel)


def plan_allowed(
    tools: Sequence[Mapping[str, Any]],
    path: str,
    choice: Mapping[str, Any],
    named: Callable[[Any, str], str],
    *,
    parallel: bool,
) -> ToolPlan:
    """The plan of those tools alone that are allowed, by the `mode` and `tools` of a choice; each is shown once.

    `named` gives the name that an entry means, by the entry and its path. Raises ApiError: 400; `param` is the path.
    """
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise refused(f"{path}.mode must be auto or required", f"{path}.mode", "invalid_value")
    if not isinstance(allowed, list) or not allowed:
        raise refused(f"{path}.tools must be a list that is not empty", f"{path}.tools", "invalid_value")
    check_num_tools(allowed, f"{path}.tools")
    wanted = {named(each, f"{path}.tools[{place}]") for place, each in enumerate(allowed)}
    kept = tuple(tool for tool in tools if tool["function"]["name"] in wanted)
    return ToolPlan(kept, required=mode == "required", parallel=parallel)


def _without_strict(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}

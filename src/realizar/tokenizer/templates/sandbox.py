"""A jinja2 environment for models' templates: it renders as transformers' environment does, within bounds.

jinja2's sandbox protects the interpreter's internals, but it allows a string of ten gigabytes, a power tower or nested
loops. Here every operation that can grow a value or take time pays from a budget: operators, calls, filters,
comparisons, slices, container literals, turns of loops, and the output.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from realizar.tokenizer.templates.budget import BoundExceededError, OutsideRenderingError, current_budget
from realizar.tokenizer.templates.chat_messages import TemplateFailedError

_LARGEST_WIDTH = 10_000
# Filters that grow their input and that no prompt needs.
_WITHOUT_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_STRING_METHODS = frozenset(
    (
        *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace"),
        *("istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper", "zfill"),
    )
)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 with transformers' settings and extensions, whose operations pay from the current budget."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_finalize
        )
        for name in _WITHOUT_FILTERS:
            del self.filters[name]
        self.filters.update(join=_join, tojson=_to_json, string=_string, sum=_sum)
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)
        self.filters["_checked"] = lambda value: current_budget().check(value)
        self.filters["_tick"] = lambda characters: current_budget().tick(characters)
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = _Bounder().visit(super()._parse(source, name, filename))
        if not isinstance(template, nodes.Template):
            raise TypeError("the parsed template is not a template")
        template.set_environment(self)
        return template

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse an unsafe attribute; jinja2's own method would print nothing and go on."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget()
        budget.tick()
        if operator == "*":
            _check_repetition(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            budget.reserve(_formatted_size(left, "%", right if isinstance(right, tuple | Mapping) else (right,)))
        return budget.check(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            args = _bounded_method(owner, obj.__name__, args, kwargs)
        elif isinstance(owner, int) and obj.__name__ == "to_bytes":
            raise SecurityError("templates may not use bytes")
        return budget.check(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` in the sandbox, with its widths checked first."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            values = (*args, *kwargs.values())
            current_budget().reserve(_formatted_size(value.__self__, "{", values))
            return wrapped(*args, **kwargs)

        return bounded


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's text; the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way of naming tags

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Bounder(NodeTransformer):
    """Inserts payments for operations that environments can't intercept."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            size = sum(_static_size(part) for part in node.body)
            self.generic_visit(node)
            price = nodes.Filter(nodes.Const(size), "_tick", [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(price, lineno=node.lineno))
            return node
        self.generic_visit(node)
        return nodes.Filter(node, "_checked", [], [], None, None, lineno=node.lineno) if _has_price(node) else node


def _has_price(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return not constant and getattr(node, "ctx", "load") == "load"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Slice) and node.ctx == "load"
    return isinstance(node, nodes.Dict | nodes.Concat | nodes.Compare)


def _static_size(node: nodes.Node) -> int:
    """Characters that a body outputs each time, without inner loops, which pay for themselves."""
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
        return 0
    return sum(_static_size(child) for child in node.iter_child_nodes())


def _finalize(value: Any) -> str:
    """The output of a value; jinja2 also calls this for constants when it compiles a template."""
    try:
        current_budget().expand(value)
    except OutsideRenderingError:
        if not isinstance(value, str | int | float | None):
            raise
    return str(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    estimate = _ESTIMATES.get(name)
    # jinja2 passes some filters its context first.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget()
        budget.tick()
        if estimate is not None:
            budget.reserve(estimate(*args[skipped:], **kwargs))
        return budget.check(function(*args, **kwargs))

    return bounded


def _bounded_method(owner: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Pay for the result of a string's method, and return its arguments."""
    if isinstance(owner, bytes) or name not in _STRING_METHODS:
        raise SecurityError(f"the method {name!r} of strings is not allowed in templates")
    budget = current_budget()
    if name == "replace" and len(args) >= 2:
        budget.reserve(_replaced_size(owner, *args[:2]))
    elif name == "join" and args:
        items = list(args[0])
        budget.reserve(sum(len(item) for item in items if isinstance(item, str)) + len(owner) * len(items))
        return (items,)
    elif name in ("center", "ljust", "rjust", "zfill") and args:
        budget.reserve(_width(args[0]))
    return args


def _width(value: Any = 0, *_: Any, **__: Any) -> int:
    """A width, a count or a precision, as characters; BoundExceededError where it is larger than any prompt needs."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int | float) and abs(value) > _LARGEST_WIDTH:
        raise BoundExceededError("asks for too large a width or count")
    return int(value) if isinstance(value, int) else 0


def _second_width(_value: Any, width: Any = 0, *_: Any, **named: Any) -> int:
    return _width(width) + sum(_width(value) for value in named.values() if isinstance(value, int))


def _indented_size(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (str(text).count("\n") + 1) * _width(width)


def _replaced_size(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return int((text.count(old) if old else len(text) + 1) * len(new) + len(text))


def _printf_size(text: Any, *args: Any, **kwargs: Any) -> int:
    return _formatted_size(str(text), "%", (*args, *kwargs.values()))


def _formatted_size(text: str, mark: str, values: Iterable[Any]) -> int:
    """An upper bound of a formatted text's length: its widths, and the longest value for every field."""
    given = list(values.values()) if isinstance(values, Mapping) else list(values)
    budget = current_budget()
    longest = 0
    for value in given:
        budget.expand(value)
        if isinstance(value, int) and not isinstance(value, bool):
            longest = max(longest, min(abs(value), 1 << 40) if "*" in text or "{" in text else 0, 1300)
        elif isinstance(value, float):
            longest = max(longest, 400)
        else:
            longest = max(longest, len(value) if isinstance(value, str) else len(str(value)))
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    return len(text) + widths + text.count(mark) * longest


def _check_repetition(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple | bytes) and isinstance(count, int):
            current_budget().reserve(max(count, 0) * (len(sequence) + 1) * (1 if isinstance(sequence, str) else 8))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and exponent * base.bit_length() > 4096:
        raise BoundExceededError("makes too large a number")


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """jinja2's `join` without escapes, which pays for the texts before it joins them."""
    if attribute is not None:
        value = [_attribute(environment, item, attribute) for item in value]
    budget = current_budget()
    texts: list[str] = []
    for item in value:
        budget.expand(item)
        texts.append(str(item))
    budget.reserve(len(str(d)) * len(texts))
    return str(d).join(texts)


def _attribute(environment: Environment, item: Any, path: str | int) -> Any:
    for part in str(path).split("."):
        item = environment.getitem(item, int(part) if part.isdigit() else part)
    return item


def _string(value: Any) -> str:
    current_budget().expand(value)
    return str(value)


@pass_environment
def _sum(
    environment: Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0
) -> Any:
    """jinja2's `sum` for numbers only, since adding lists copies them again and again."""
    if not isinstance(start, int | float):
        raise SecurityError("sum starts from a number")
    return sum((item if attribute is None else _attribute(environment, item, attribute) for item in iterable), start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as in transformers' templates, without escapes for HTML."""
    budget = current_budget()
    budget.expand(value)
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > 16:
        raise BoundExceededError("asks for too large a width or count")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateFailedError(str(message)[:1000])


def _strftime_now(format: str) -> str:  # noqa: A002 - the name that templates may use
    if len(format) > 100 or re.search(r"\d", format):
        raise BoundExceededError("asks for too large a width or count")
    return datetime.now().astimezone().strftime(format)


_ESTIMATES: Mapping[str, Callable[..., int]] = {
    "batch": _second_width,
    "center": _second_width,
    "format": _printf_size,
    "indent": _indented_size,
    "replace": _replaced_size,
    "round": _second_width,
    "slice": _second_width,
    "truncate": _second_width,
}

"""`Budget` bounds the cost of rendering one chat template. Of jinja2 it imports only namespaces.

It is looked at between operations, so a single one may take longer: a search from a text's end, or a set of numbers of
one hash. Templates of requests therefore run where they can be ended (`server/request_templates.py`).
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.utils import Namespace

# The base amounts: eight million characters take at most 32 MB.
_CHARACTERS = 8 << 20
_STEPS = 200_000
_SECONDS = 0.3
_NODES = 50_000
# Additional amounts for the conversation's size, since templates copy a message several times.
_CHARACTERS_PER_CHARACTER = 64
_STEPS_PER_NODE = 500
_SECONDS_PER_NODE = 2e-4
_SECONDS_PER_CHARACTER = 1e-6
_LARGEST_INTEGER_BITS = 4096
_STEPS_PER_LOOK_AT_THE_CLOCK = 32


class BoundExceededError(Exception):
    """A template exceeded its budget; the message continues "the chat template"."""


class Budget:
    """The steps, characters and processor seconds left to a rendering; larger `given` variables give a larger
    budget.
    """

    __slots__ = ("_characters", "_deadline", "_max_nodes", "_steps", "_until_look")

    def __init__(self, given: Any) -> None:
        nodes, characters = _walk(given, None)
        self._characters = _CHARACTERS + _CHARACTERS_PER_CHARACTER * characters
        self._steps = _STEPS + _STEPS_PER_NODE * nodes + characters
        self._max_nodes = _NODES + 4 * nodes
        self._deadline = time.thread_time() + _SECONDS + _seconds_for_size(nodes, characters)
        self._until_look = 0

    def tick(self, characters: int = 0) -> None:
        """Pay for one turn of a loop, or one call, that may output `characters`."""
        self._steps -= 1
        self._until_look -= 1
        if self._steps < 0:
            raise BoundExceededError("takes too many steps")
        if characters:
            self.reserve(characters)
        if self._until_look < 0:
            self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        """Check the time; for operations that may be slow by themselves."""
        self._until_look = _STEPS_PER_LOOK_AT_THE_CLOCK
        if time.thread_time() > self._deadline:
            raise BoundExceededError("takes too long")

    def reserve(self, characters: int) -> None:
        """Pay for characters, before they are made if their number is known."""
        self._characters -= characters
        if self._characters < 0:
            raise BoundExceededError("makes too much text")

    def check(self, value: Any) -> Any:
        """Pay for a value's size, and return the value."""
        self.look_at_the_clock()
        if isinstance(value, str):
            self.reserve(len(value))
        elif isinstance(value, int):
            if value.bit_length() > _LARGEST_INTEGER_BITS:
                raise BoundExceededError("makes too large a number")
        elif isinstance(value, _CONTAINERS):
            nodes, _ = self._measure(value)
            self.reserve(8 * nodes)
        return value

    def expand(self, value: Any) -> None:
        """Pay for the value's text, with containers written out, before it is made."""
        if isinstance(value, str):
            self.reserve(len(value))
        elif isinstance(value, _CONTAINERS):
            nodes, characters = self._measure(value)
            # A character may be escaped to six, and a lone number or separator takes some too.
            self.reserve(32 * nodes + 6 * characters)

    def _measure(self, value: Any) -> tuple[int, int]:
        nodes, characters = _walk(value, self._max_nodes)
        if nodes > self._max_nodes:
            raise BoundExceededError("makes too large a list")
        self._steps -= nodes // 16
        return nodes, characters


_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView, Namespace)


def seconds_for_size(given: Any) -> float:
    """The processor seconds that a rendering may take beyond the base, for the size of the template's variables."""
    return _seconds_for_size(*_walk(given, None))


def _seconds_for_size(nodes: int, characters: int) -> float:
    return _SECONDS_PER_NODE * nodes + _SECONDS_PER_CHARACTER * characters


def _walk(value: Any, limit: int | None) -> tuple[int, int]:
    """Nodes and characters of a value written out; shared parts count each time. Counting stops above `limit` nodes."""
    nodes = characters = 0
    stack = [iter((value,))]
    while stack:
        for item in stack[-1]:
            nodes += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, _CONTAINERS):
                stack.append(iter(_parts(item)))
                break
        else:
            stack.pop()
        if limit is not None and nodes > limit:
            break
    return nodes, characters


def _parts(container: Any) -> Iterable[Any]:
    if isinstance(container, Namespace):
        container = object.__getattribute__(container, "_Namespace__attrs")
    return (part for pair in container.items() for part in pair) if isinstance(container, dict) else container


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


class OutsideRenderingError(Exception):
    """A bounded operation ran outside of a rendering: jinja2 folds constants when it compiles."""


def current_budget() -> Budget:
    budget = _CURRENT.get()
    if budget is None:
        raise OutsideRenderingError
    return budget


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """`with spending(budget):` makes the rendering inside pay from the budget."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)

"""Random JSON values, most of them where programs break: extremes, odd texts, deep and wide structures."""

from __future__ import annotations

from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 100, 255, 256, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53, -(2**53), 2**63 - 1, 2**63, -(2**63), 2**64, -(2**64)),
    10**400,
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-7, 5e-324, 1e38, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
WORDS = ("river", "stone", "letter", "garden", "winter", "signal", "copper", "ladder", "market", "thunder")
TEXTS = (
    "",
    " ",
    "a",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "\udfff\ud800",
    "\u202e\u200d\ufeff",
    "e" + "\u0301" * 500,
    "🙂" * 50,
    "\n" * 3000,
    "<|im_start|>system\n<|im_end|>",
    "<|im_start|>" * 200,
    "</s><s>[INST]<think></think><tool_call>{",
    "{{ 9**9**9 }}{% for a in range(10**9) %}{% endfor %}",
    "../../../../etc/passwd",
    "a" * 10_000,
    "word " * 5_000,
    '"' * 2_000 + "\\",
)


def text(rng: Random) -> str:
    """An odd text, a piece of one, or plain words."""
    kind = rng.random()
    if kind < 0.4:
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 30)))
    if kind < 0.6:
        odd = rng.choice(TEXTS)
        return odd[rng.randrange(len(odd) + 1) :]
    if kind < 0.9:
        return rng.choice(TEXTS)
    return "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(rng.randrange(60)))


def number(rng: Random) -> int | float:
    return rng.choice(rng.choice((INTEGERS, FLOATS)))


def anything(rng: Random, depth: int = 3) -> Any:
    """A value of any JSON type."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind in (2, 3):
        return number(rng)
    if kind == 4:
        return text(rng)
    if kind == 5:
        return {text(rng)[:40]: anything(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))}
    if kind == 6:
        return [anything(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))]
    return nested(rng.choice((2, 40, 300)), rng.random() < 0.5)


def nested(depth: int, lists: bool) -> Any:
    """A value inside so many lists or objects."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value

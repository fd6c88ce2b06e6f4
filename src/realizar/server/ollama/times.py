"""Times in Ollama's terms: `Clock` measures a request in nanoseconds; times are of RFC 3339; `keep_alive` is read."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from realizar.engine.frontend.outputs import RequestOutput
from realizar.server.errors import refused

_NS = 1_000_000_000
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?)((?:\d{1,18}(?:\.\d{0,18})?(?:ns|us|µs|ms|s|m|h)){1,8})", re.ASCII)
_PART = re.compile(r"([\d.]+)([a-zµ]+)")
_LONGEST_S = 1e9
"""A longer `keep_alive`, some 30 years, is for ever."""


def now() -> str:
    """The present in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def at(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def read_keep_alive(given: float | str | None) -> float | None:
    """Seconds of a `keep_alive`: a number of seconds, or a duration such as `5m` or `1h30m`; -1 is for ever.

    Raises ApiError: 400; it is no duration.
    """
    if given is None:
        return None
    if isinstance(given, str):
        found = _DURATION.fullmatch(given)
        if found is None and not re.fullmatch(r"-?\d{1,18}", given, re.ASCII):
            raise refused("keep_alive must be seconds or a duration such as 5m", "keep_alive", "invalid_value")
        if found is None:
            given = float(given)
        else:
            total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(found[2]))
            given = -total_s if found[1] else total_s
    return -1.0 if given < 0 or given > _LONGEST_S else float(given)


class Clock:
    """Begins when it is made, as the request arrives."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._asked_s = self._loaded_s = self._submitted_s = self._began_s
        self._first_s: float | None = None

    def asks(self) -> None:
        """Note that the request waits for its model from now on."""
        self._asked_s = time.monotonic()

    def loaded(self) -> None:
        self._loaded_s = time.monotonic()

    def submitted(self) -> None:
        self._submitted_s = time.monotonic()

    def came(self) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()

    def totals(self) -> dict[str, int]:
        """The duration of all, and of waiting for the model."""
        return {
            "total_duration": _ns(time.monotonic() - self._began_s),
            "load_duration": _ns(self._loaded_s - self._asked_s),
        }

    def figures(self, num_prompt: int, num_generated: int, output: RequestOutput | None) -> dict[str, Any]:
        """The durations and counts of an answer; `num_prompt` tokens of the prompt include those in the cache.

        An output of None was not waited for, as the answer ends with its only call: times are then those of its arrival
        here.
        """
        if output is not None:
            prompt_s, decode_s = output.timings.prefill_s, output.timings.decode_s
        else:
            first_s = self._submitted_s if self._first_s is None else self._first_s
            prompt_s, decode_s = first_s - self._submitted_s, time.monotonic() - first_s
        return {
            **self.totals(),
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": _ns(prompt_s),
            "eval_count": num_generated,
            "eval_duration": _ns(decode_s),
        }


def _ns(duration_s: float) -> int:
    """Nanoseconds; at least one, since clients divide by them."""
    return max(round(duration_s * _NS), 1)

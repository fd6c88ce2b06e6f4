"""`Clock` measures a request in Ollama's terms: durations in nanoseconds, and times of RFC 3339."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from realizar.outputs import RequestOutput

_NS = 1_000_000_000


def now() -> str:
    """The present in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def at(unix_s: float) -> str:
    """A Unix time."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


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
        """Note that the model is there."""
        self._loaded_s = time.monotonic()

    def submitted(self) -> None:
        """Note that the engine gets the request."""
        self._submitted_s = time.monotonic()

    def came(self) -> None:
        """Note that some output came."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def totals(self) -> dict[str, int]:
        """The duration of all, and of waiting for the model."""
        return {
            "total_duration": _ns(time.monotonic() - self._began_s),
            "load_duration": _ns(self._loaded_s - self._asked_s),
        }

    def figures(self, num_prompt: int, num_generated: int, output: RequestOutput | None) -> dict[str, Any]:
        """The durations and counts of an answer.

        Args:
            num_prompt: tokens of the prompt, those that were in the cache too.
            output: the engine's output, whose times count; None if it was not waited for: an answer that ends with its
                only call. The times are then those of the output's arrival here.
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

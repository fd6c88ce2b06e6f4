"""`-v` of commands that run a model or look at the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMANDS = ("run", "chat", "bench", "profile", "trace", "score", "perplexity", "tune", "doctor")


def test_the_log_is_shown(weights_only: Path) -> None:
    words = ("profile", weights_only, "--device", "cpu", "--threads", "1", "--context", "8", "--repeats", "1", "--json")
    for more, expected in ((), False), (("-v",), True):
        command = [sys.executable, "-m", "realizar", *map(str, words), *more]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.startswith("{")
        shown = [line for line in result.stderr.splitlines() if line.startswith("realizar: loaded ")]
        assert bool(shown) == expected, result.stderr


def test_every_command_has_it(realizar: Callable[..., Any]) -> None:
    for command in COMMANDS:
        assert "--verbose -v" in realizar(command, "--help").stdout, command

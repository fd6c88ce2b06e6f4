"""`python -m clients.serve`: a server of the model that answers by script, or improvises without one, until SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

from clients.played_model import PlayedBackend, Turn, played_server


def improvised(prompt: str, messages: list[tuple[str, str]]) -> Turn:
    """Calls the first tool that a user's question came with; says hello else."""
    role, _ = messages[-2] if len(messages) > 1 else ("", "")
    if role == "user" and messages[0][1].startswith("# Tools"):
        function = json.loads(messages[0][1].splitlines()[1])["function"]
        return Turn(calls=((function["name"], _value_of(function.get("parameters") or {})),))
    return Turn("Hello there, friend.")


def _value_of(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object" | None:
            return {name: _value_of(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return []
        case "string":
            return "Rome"
        case "boolean":
            return True
        case _:
            return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="names of the model; more than one may be given")
    names = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {} if names is None else {"names": names}
        thread = played_server(Path(folder), PlayedBackend(improvised), **options)
        print(thread.start().url, flush=True)  # noqa: T201 - whoever started it reads this
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        thread.stop()


if __name__ == "__main__":
    main()

"""Lines of the log: as JSON each line of stderr is one object, whoever wrote it; what can't be written is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_CODE = """
import logging, sys
from realizar.cli.terminal.log_lines import log_to_stderr
log_to_stderr("info", "json")
log = logging.getLogger("realizar.access")
log.info("GET %s", "/x", extra={"fields": {"path": "/x", "status": 200, "duration_s": 0.25, "text": "a\\nb\\x1b"}})
log.debug("not shown")
try:
    raise ValueError("no\\nfile")
except ValueError:
    log.exception("failed")
print("warning: open to all", file=sys.stderr)
print("compiling\\n\\nready: http://127.0.0.1:8000", file=sys.stderr, flush=True)
print("realizar: port in use", file=sys.stderr)
"""


def _lines() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_an_object() -> None:
    access, failure, warning, compiling, ready, refusal = _lines()
    assert access["time"].endswith("Z")
    assert {name: access[name] for name in access if name != "time"} == {
        "level": "info",
        "message": "GET /x",
        "path": "/x",
        "status": 200,
        "duration_s": 0.25,
        "text": "a\nb\x1b",
    }
    assert failure["level"] == "error"
    assert "ValueError: no\nfile" in failure["exception"]
    assert [(line["level"], line["message"]) for line in (warning, compiling, ready, refusal)] == [
        ("warning", "warning: open to all"),
        ("info", "compiling"),
        ("info", "ready: http://127.0.0.1:8000"),
        ("error", "realizar: port in use"),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("lost", ["full disk", "closed pipe"])
def test_lines_that_cannot_be_written_are_lost(lost: str, form: str) -> None:
    if lost == "full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stderr = os.pipe()
        os.close(reader)
    code = _CODE.replace('"json"', f'"{form}"') + 'print("went on")'
    done = subprocess.run([sys.executable, "-c", code], stderr=stderr, stdout=subprocess.PIPE, check=False)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (0, b"went on\n")

"""A plugin of pytest that writes what became of each test, and why, as lines of JSON: SUITE_REPORT names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test that failed in any of its phases has failed; a suite's own expected failures count as left out."""
    if report.when == "call" or report.outcome != "passed":
        _note(report, getattr(report, "wasxfail", ""))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed":
        _note(report, "")


def _note(report: Any, expected: str) -> None:
    shown = report.longrepr
    if report.outcome == "skipped" and isinstance(shown, tuple):
        why = str(shown[2]).removeprefix("Skipped: ")
    else:
        crash = getattr(shown, "reprcrash", None)
        why = crash.message if crash is not None else str(shown or "")
    with Path(os.environ["SUITE_REPORT"]).open("a") as file:
        file.write(json.dumps((report.nodeid, report.outcome, expected or why)) + "\n")

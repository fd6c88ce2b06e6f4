"""The progress lines of loading a model."""

from __future__ import annotations

import io
import threading

import pytest

from realizar.cli.terminal import load_progress as module
from realizar.cli.terminal.load_progress import load_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.0)


def load() -> None:
    with load_progress() as report:
        for share in (0.25, 0.5, 1.0):
            report("loading weights", share)
        report("compiling linear", 1.0)


@pytest.mark.usefixtures("at_once")
def test_a_log_gets_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    load()
    assert capsys.readouterr().err == "loading weights\ncompiling linear\n"


@pytest.mark.usefixtures("at_once")
def test_a_terminal_gets_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    load()
    assert "\n" not in terminal.getvalue()
    states = [state.rstrip() for state in terminal.getvalue().split("\r")]
    assert states == ["", "loading weights 25%", "loading weights 50%", "loading weights", "compiling linear", "", ""]


@pytest.mark.usefixtures("at_once")
def test_a_timer_shows_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may fire between a report that was shown and the next."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with load_progress() as report:
        report("loading weights", 0.25)
        wait_for_timers()
    assert terminal.getvalue().count("loading weights 25%") == 1


def test_a_quick_start_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    load()
    assert capsys.readouterr().err == ""


def wait_for_timers() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()


def test_a_start_without_reports_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_SILENCE_S", 0.01)
    with load_progress():
        wait_for_timers()
    assert capsys.readouterr().err == "starting\n"  # and no word of compiling, which nobody has reported


def test_a_first_stage_that_takes_long_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.01)
    with load_progress() as report:
        report("compiling kernels for this processor, once", 1.0)
        wait_for_timers()
    assert capsys.readouterr().err == "compiling kernels for this processor, once\n"

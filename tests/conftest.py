"""Fixtures for all tests: two real models, interrupts, rules for skipping, and no deadlines for generated examples."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import ssl
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from httpx._transports import default as httpx_transports
from httpx2._transports import default as httpx2_transports
from hypothesis import HealthCheck, settings

# Threads of torch and BLAS spin while they wait: with as many workers as cores they take the others' time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _share_context(transports: Any) -> None:
    """One for all clients that ask for nothing else: to read all certificates takes 22 ms of processor, and tests ask
    servers thousands of times whether they are ready.
    """
    new_context = transports.create_ssl_context
    shared_context = cache(new_context)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return shared_context() if verify is True and cert is None else new_context(verify, cert, trust_env)

    transports.create_ssl_context = context


_share_context(httpx_transports)
_share_context(httpx2_transports)  # of OpenAI's client

# Hypothesis counts seconds, and a busy machine has few of them.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("some", _ANY_MACHINE, max_examples=40)
settings.register_profile("full", _ANY_MACHINE, max_examples=500)

# torchvision is not among them: the CPU build of torch has none that fits.
_LACKS = re.compile(
    r"torch(?!vision)|transformers|triton|cuda-bindings|chromium|lm_eval|langchain|schemathesis|opentelemetry",
    re.IGNORECASE,
)
_skipped_for_lack: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the wider matrices, marked `full`")
    parser.addoption(
        "--record-parity", action="store_true", help="note the rows that agree with transformers in tests/data"
    )
    parser.addoption("--server-url", help="test the server of SmolLM2 that answers there, and start none")
    parser.addoption(
        "--no-skips", action="store_true", help="fail on a skip for lack of torch, transformers or Chromium"
    )
    parser.addoption(
        "--processor-times", type=Path, help="a file that gets a line a test: seconds of processor, children's too"
    )
    parser.addoption(
        "--first-cases", action="store_true", help="run the first case alone of each test, as for compute-sanitizer"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "some")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--first-cases"):
        _keep_first_cases(config, items)
    if config.getoption("markexpr") != "ray":
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="needs Ray: -m ray"))
    if not config.getoption("--full"):
        _keep(config, items, [item for item in items if not item.get_closest_marker("full")])


def _keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    first: dict[tuple[Path, str], pytest.Item] = {}
    for item in items:
        first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
    _keep(config, items, list(first.values()))


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    ids = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Spare each collection of garbage a million objects of modules and tests: it took half a second for them."""
    gc.disable()
    found = yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)  # they took a twentieth of the processor time of the server's tests
    if ahead := sys.modules.get("realizar.backends.cpu.compile_ahead"):
        ahead._MOST_PROCESSES = 0  # type: ignore[attr-defined] # one takes longer to start than most kernels to compile
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    before_s = _processor_s()
    result = yield
    if path := item.config.getoption("--processor-times"):
        with path.open("a", encoding="utf-8") as lines:
            lines.write(f"{_processor_s() - before_s:.3f}\t{item.nodeid}\n")
    return result


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(each.ru_utime + each.ru_stime for each in used)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Remember a skip whose reason names something that CI is meant to have."""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
        if _LACKS.search(reason):
            _skipped_for_lack.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--no-skips") and _skipped_for_lack and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--no-skips") and _skipped_for_lack:
        terminalreporter.section("skipped for lack of torch, transformers or Chromium", red=True)
        for line in sorted(set(_skipped_for_lack)):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    from realizar.hub.pull import pull

    return pull("smollm2:135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma-3-270M, Q4_K_M."""
    from realizar.hub.pull import pull

    return pull("gemma3:270m")


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Python's own handler of interrupts, which a shell that starts tests in the background leaves out."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

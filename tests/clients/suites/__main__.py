"""`PYTHONPATH=tests python -m clients.suites`: suites that others wrote, against servers of realizar.

Nothing is fetched: each suite lies where its option says. The counts of passed, left out and failed tests are printed,
the last two by reason, and the status is 1 if a test fails without a reason in `reasons.toml`. Beside what the suites
import themselves the environment needs pytest-asyncio and pytest-timeout.

    --open-responses FOLDER     a checkout of Open Responses with its packages; needs bun
    --llama-cpp FOLDER          llama.cpp's sources, or their tools/server/tests alone
    --vllm FOLDER               vLLM's sources, or their tests alone
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

TESTS = Path(__file__).parents[2]
VLLM_TESTS = ("openai", "anthropic", "serve/tokenize")  # those that ask a server of text
Outcomes: TypeAlias = dict[str, tuple[str, str]]
"""What became of each test, and why: `passed`, `skipped` or `failed`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--open-responses", "--llama-cpp", "--vllm"):
        parser.add_argument(name, type=Path)
    parser.add_argument("tests", nargs="*", help="arguments for pytest, such as some of a suite's files")
    given = parser.parse_args()
    reasons = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text())
    num_unexplained = 0
    if given.open_responses:
        num_unexplained += _show("Open Responses", _open_responses(given.open_responses), reasons["open_responses"])
    if given.llama_cpp:
        folder = given.llama_cpp / "tools/server/tests"
        found = _pytest("llama_cpp", folder if folder.exists() else given.llama_cpp, given.tests or ["unit"])
        num_unexplained += _show("llama.cpp", found, reasons["llama_cpp"])
    if given.vllm:
        chosen = given.tests or [f"tests/entrypoints/{name}" for name in VLLM_TESTS]
        options = ("--confcutdir=tests/entrypoints", "-oasyncio_mode=auto", "--continue-on-collection-errors")
        found = _pytest("vllm_client", given.vllm, [*options, *chosen])
        num_unexplained += _show("vLLM", found, reasons["vllm"])
    return 1 if num_unexplained else 0


def _pytest(plugin: str, folder: Path, arguments: Sequence[str]) -> Outcomes:
    """Run tests of a suite in their folder, with what replaces its fixture."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        paths = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--timeout=900", "-pno:cacheprovider"]
        plugins = [f"-pclients.suites.{name}" for name in (plugin, "report")]
        environment = {**os.environ, "PYTHONPATH": paths, "SUITE_REPORT": str(report)}
        subprocess.run([*command, *plugins, *arguments], cwd=folder, env=environment, check=False)
        found: Outcomes = {}
        for name, outcome, why in map(json.loads, report.read_text().splitlines()):
            if found.get(name, ("", ""))[0] != "failed":
                found[name] = (outcome, why)
        return found


def _open_responses(folder: Path) -> Outcomes:
    """Run its compliance tests against the model that answers by script."""
    server = subprocess.Popen(
        [sys.executable, "-m", "clients.serve", "--model", "played"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        asked = ("--base-url", f"{url}/v1", "--api-key", "none", "--model", "played", "--json")
        command = ["bun", "bin/compliance-test.ts", *asked]
        made = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=False)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    results = json.loads(made.stdout)["results"]
    return {each["id"]: (each["status"], "; ".join(each.get("errors") or ())) for each in results}


def _show(suite: str, outcomes: Outcomes, reasons: Iterable[dict[str, str | list[str]]]) -> int:
    """Print what became of a suite; returns the number of failed tests without a reason."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    failed = {name: why for name, (outcome, why) in outcomes.items() if outcome == "failed"}
    _say(f"\n{suite}: {counts['passed']} passed, {counts['skipped']} left out, {len(failed)} failed")
    for why, count in Counter(why for outcome, why in outcomes.values() if outcome == "skipped").most_common():
        _say(f"  left out {count:4}: {why}")
    for each in reasons:
        known = [name for name in failed if name.startswith(tuple(each["tests"]))]
        if known:
            _say(f"  failed   {len(known):4}: {each['reason']}")
        for name in known:
            del failed[name]
    for name, why in failed.items():
        _say(f"  failed, and nobody knows why: {name}: {' '.join(why.split())[:300]}")
    return len(failed)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is the program's output


if __name__ == "__main__":
    sys.exit(main())

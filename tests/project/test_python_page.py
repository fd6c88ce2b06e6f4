"""Every snippet of docs/python.md, and the README's, runs as it stands and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from engine.process.served import serving
from realizar.config import EngineConfig
from realizar.engine.llm_options import VLLM_NAMES

_PAGE = Path(__file__).parents[2] / "docs" / "python.md"
_TEXT = _PAGE.read_text(encoding="utf-8")
_README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
_LOCAL, _REMOTE = _TEXT.split("\n## Clients of a server\n")
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = "# -> "
_ADDRESS = "http://127.0.0.1:8000"


def _promised(snippet: str) -> str:
    return "".join(line.removeprefix(_MARK) + "\n" for line in snippet.splitlines() if line.startswith(_MARK))


def _run(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet with the names of those before it; its output must be what its `# ->` lines say, if it has any."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet, str(_PAGE), "exec"), names)
    assert not _promised(snippet) or printed.getvalue() == _promised(snippet)


def test_options_are_those_of_a_configuration() -> None:
    """The page's options are fields of `EngineConfig`, beside vLLM's names for them."""
    table = _LOCAL.partition("| option | vLLM's name |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \| (`(\w+)`)? ?\|", table, re.MULTILINE)
    named = {option: vllm for options, _, vllm in rows for option in re.findall(r"`(\w+)`", options)}
    assert set(named) <= {field.name for field in fields(EngineConfig)}
    assert {vllm: option for option, vllm in named.items() if vllm} == dict(VLLM_NAMES)


def test_snippets_with_the_model_in_this_process(smollm2_path: Path) -> None:
    names: dict[str, Any] = {}
    try:
        for snippet in _SNIPPET.findall(_LOCAL):
            _run(snippet, names)
        (snippet,) = _SNIPPET.findall(_README)
        _run(snippet.replace('llm = LLM("smollm2:135m")', ""), names)
    finally:
        if "llm" in names:
            names["llm"].close()


@pytest.fixture(scope="module")
def address(smollm2_path: Path) -> Iterator[str]:
    """The address of a server that is started as the page says, but for the port."""
    (command,) = re.findall(r"^realizar serve (.*)$", _REMOTE, re.MULTILINE)
    with serving(*command.split()) as served:
        yield served.wait_ready()


def test_snippets_of_clients(address: str) -> None:
    names: dict[str, Any] = {}
    exec("import json", names)
    for snippet in _SNIPPET.findall(_REMOTE):
        if "langchain" not in snippet:
            _run(snippet.replace(_ADDRESS, address), names)


def test_langchains_snippet(address: str) -> None:
    pytest.importorskip("langchain_openai", reason="langchain is absent")
    (snippet,) = [text for text in _SNIPPET.findall(_REMOTE) if "langchain" in text]
    _run(snippet.replace(_ADDRESS, address), {})


def test_a_snippet_that_prints_something_else_is_found() -> None:
    """The rule above can fail."""
    _run("print(1)\n# -> 1\n", {})
    with pytest.raises(AssertionError):
        _run("print(2)\n# -> 1\n", {})

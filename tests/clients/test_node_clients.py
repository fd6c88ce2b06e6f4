"""The AI SDK and qwen-code, which run in Node: `make clients` installs them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S

FOLDER = Path(__file__).parents[2] / ".venv-clients"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules").exists(), reason="`make clients` alone installs clients of Node"
)

ANSWER = {"city": "Paris", "celsius": 21}
SAID = Turn(json.dumps(ANSWER))
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})), "I need two tools.")
RESULTS = Turn("They are {results}.")
MAIL = Turn(calls=(("mail", {"to": "a@example.org"}),))
PROVIDERS = ["compatible", "chat", "responses"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node looks for packages beside a script."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(FOLDER / "node_modules")
    return Path(shutil.copy(Path(__file__).with_name("ai_sdk.mjs"), folder))


def ai_sdk(server: RunningServer, script: Path, provider: str, case: str, *turns: Turn) -> Any:
    return ran(server, script, provider, case, play(*turns))


def ran(server: RunningServer, script: Path, *arguments: str) -> Any:
    assert NODE is not None
    command = [NODE, script, f"{server.url}/v1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_text_after_tools(played: RunningServer, script: Path, provider: str) -> None:
    given = ai_sdk(played, script, provider, "generateText", BOTH, RESULTS)
    assert given == {"text": "They are 5, 21 C in Paris.", "steps": 2}
    given = ai_sdk(played, script, provider, "streamText", BOTH, RESULTS)
    assert (given["text"], given["steps"]) == ("They are 5, 21 C in Paris.", 2)
    assert {"text-delta", "tool-input-delta", "tool-call", "tool-result", "finish"} <= set(given["kinds"])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", ["required", "named"])
def test_forced_calls_among_zods_formats(played: RunningServer, script: Path, provider: str, case: str) -> None:
    assert ai_sdk(played, script, provider, case, MAIL) == ["sent to a@example.org"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", ["outputWithTools", "streamedOutputWithTools"])
def test_an_object_beside_a_schema_and_tools(played: RunningServer, script: Path, provider: str, case: str) -> None:
    assert ai_sdk(played, script, provider, case, replace(BOTH, say=""), SAID) == ANSWER


@pytest.mark.parametrize("provider", PROVIDERS)
def test_objects(played: RunningServer, script: Path, provider: str) -> None:
    array = Turn(json.dumps({"elements": [ANSWER, ANSWER]}))
    assert ai_sdk(played, script, provider, "generateObject", SAID) == ANSWER
    assert ai_sdk(played, script, provider, "streamObject", SAID) == ANSWER
    assert ai_sdk(played, script, provider, "generateArray", array) == [ANSWER, ANSWER]
    assert ai_sdk(played, script, provider, "generateEnum", Turn('{"result": "warm"}')) == "warm"


def test_reasoning(played: RunningServer, script: Path) -> None:
    given = ai_sdk(played, script, "compatible", "reasoning", Turn("Yes.", think="Hm."))
    assert given == {"reasoning": "Hm.", "text": "Yes."}


@pytest.mark.parametrize(("provider", "case"), [*((each, "image") for each in PROVIDERS), ("responses", "imageOfTool")])
def test_an_image_is_shown(seeing: RunningServer, script: Path, png: bytes, provider: str, case: str) -> None:
    """In a message, or as a tool's result, which the other providers write as text."""
    asked = (seeing, script, provider, case, "What is this?", NAME)
    given, blind = ran(*asked, base64.b64encode(png).decode()), ran(*asked, "")
    assert given["text"]
    assert given["tokens"] - blind["tokens"] > 16 * 10


@pytest.mark.parametrize("form", ["text", "json"])
def test_qwen_code(played: RunningServer, tmp_path: Path, form: str) -> None:
    """It reads a file and answers, without anybody to ask."""
    (tmp_path / "note.txt").write_text("The word is plum.\n")
    turns = Turn("I look.", (("read_file", {"file_path": str(tmp_path / "note.txt")}),)), Turn("It says: {results}")
    command = [
        *(str(FOLDER / "node_modules/.bin/qwen"), "-p", play(*turns), "--yolo", "--output-format", form),
        *("--auth-type", "openai", "--openai-api-key", "none", "--openai-base-url", f"{played.url}/v1"),
        *("--model", "other"),
    ]
    environment = os.environ | {"HOME": str(tmp_path), "NO_COLOR": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "The word is plum." in done.stdout

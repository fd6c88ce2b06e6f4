"""An agent's 20 turns with a server of a model that has states, which is killed in between: what is new is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from clients.played_hybrid import write_hybrid
from engine.process.served import kill, serving, wait_saved
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from server.test_agent_replay import Body, Turn, anthropic_counts, messages, prose, responses, responses_counts
from waits import HANG_S

BLOCK = 32
NUM_OUTPUT = 70
NUM_TURNS = 20
KILLED_BEFORE = (2, 11)
LETTERS = range(97, 123)
SYSTEM = prose(60)


def write_letters(path: Path) -> None:
    """A hybrid of random weights that answers with letters, as all other logits are 0: its texts are its tokens."""
    plain = path.with_name("plain.gguf")
    write_hybrid(plain)
    checkpoint = open_checkpoint(plain)
    tensors = []
    for name, tensor in checkpoint.tensors.items():
        data = np.array(tensor.data).reshape(tensor.shape[0] if name == "output.weight" else 1, -1)
        if name == "output.weight":
            data[[row for row in range(len(data)) if row not in LETTERS]] = 0
        tensors.append(NewTensor(name, tensor.ggml_type, tensor.shape, data.reshape(-1)))
    write_gguf(path, checkpoint.metadata, tensors)


def message_text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for part in answer["content"])


def response_text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] for part in item["content"])


@pytest.mark.parametrize(
    ("body_of", "counts_of", "text_of"),
    [
        (messages, anthropic_counts, message_text),
        pytest.param(responses, responses_counts, response_text, marks=pytest.mark.full),
    ],
    ids=["messages", "responses"],
)
def test_a_killed_server_goes_on_with_the_next_turn(
    body_of: Callable[[list[Turn], str, str], Body],
    counts_of: Callable[[dict[str, Any]], tuple[int, int, int]],
    text_of: Callable[[dict[str, Any]], str],
    tmp_path: Path,
) -> None:
    """The client brings each answer back, and a call after every other one."""
    write_letters(tmp_path / "letters.gguf")
    options = ("--cache-dir", tmp_path / "cache", "--context-length", "8192", "--threads", "1", "--max-running", "2")
    turns, computed = [Turn("", None, prose(20))], 0
    for end in (*KILLED_BEFORE, NUM_TURNS):
        with serving(tmp_path / "letters.gguf", *options) as served:
            url = served.wait_ready()
            for place in range(len(turns) - 1, end):
                path, body = body_of(turns, SYSTEM, f"{place:05x}")
                limit = "max_tokens" if "max_tokens" in body else "max_output_tokens"
                response = httpx.post(
                    f"{url}{path}", json={"model": "letters", **body, limit: NUM_OUTPUT}, timeout=HANG_S
                )
                assert response.status_code == 200, response.text
                prompt, cached, output = counts_of(response.json())
                assert output == NUM_OUTPUT
                assert computed - BLOCK < cached <= computed + 1, place
                computed = prompt + NUM_OUTPUT - 1  # the last token may not have been computed
                turns.append(Turn(text_of(response.json()), f"call_{place}" if place % 2 else None, prose(20)))
            wait_saved(tmp_path / "cache")
            kill(served)

"""A model that answers as the conversation itself says, behind a real engine: reasoning, calls, JSON, turn by turn.

A user's message holds `play: [...]`, a JSON list with a `Turn` for each answer to it. Tokens are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.spec import ModelSpec
from realizar.server.settings import ServerSettings
from scripted_backend import OpenRow, ScriptedBackend
from server_thread import NAMES, ServerThread
from tiny_model import write_tiny_model

# Calls in the style of Hermes and Qwen; a prompt ends inside of reasoning where a request turns it on.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}{% endif %}"""
END = 256  # of an answer, in the tiny model's vocabulary
CONTEXT = 256 << 10
_BLOCK = 16
_PARTS = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|$)", re.DOTALL)


@dataclass(frozen=True)
class Turn:
    """One answer: `think` is reasoning, then comes `say`, in which {results} are those of tools, then `calls`."""

    say: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    think: str = ""


def play(*turns: Turn) -> str:
    """A user's text that asks for these answers."""
    return f"play: {json.dumps([asdict(turn) for turn in turns])}"


Improvise = Callable[[str, list[tuple[str, str]]], Turn]
"""The answer to a prompt that has no script: of the prompt, and of its messages as roles and texts."""


def no_script(prompt: str, messages: list[tuple[str, str]]) -> Turn:
    return Turn("There is no script.")


def answer_to(prompt: str, improvise: Improvise = no_script) -> str:
    """What the model writes after a prompt."""
    messages = _PARTS.findall(prompt)
    last = max((i for i, (role, text) in enumerate(messages) if role == "user" and "play: [" in text), default=None)
    if last is None:
        turn, results = improvise(prompt, messages), []
    else:
        after = messages[last + 1 :]
        turns, _ = json.JSONDecoder().raw_decode(messages[last][1].partition("play: ")[2])
        place = sum(role == "assistant" for role, _ in after) - 1  # the last is the one that begins
        turn = Turn(**turns[place]) if place < len(turns) else Turn("The script is at its end.")
        results = [text for role, text in after if role == "tool"]
    said = turn.say.replace("{results}", ", ".join(results))
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in turn.calls
    ]
    text = "\n".join([*([said] if said else []), *calls])
    if prompt.endswith("<think>\n"):
        return f"{turn.think}\n</think>\n\n{text}"
    return f"<think>\n{turn.think}\n</think>\n\n{text}" if turn.think else text


class PlayedBackend(ScriptedBackend):
    """Writes the scripts' answers. What a grammar forbids of them is left out if it is a blank, else noted."""

    vocab_size = 512

    def __init__(self, improvise: Improvise = no_script, num_snapshots: int | None = None) -> None:
        blocks = (CONTEXT // _BLOCK,)
        options: dict[str, Any] = {"max_rows": 16, "max_step_tokens": 4096, "context_length": CONTEXT}
        super().__init__((), block_size=_BLOCK, num_blocks=blocks, num_snapshots=num_snapshots, **options)
        self._improvise = improvise
        self._left: dict[int, tuple[OpenRow, list[int]]] = {}
        self.forbidden: list[str] = []

    def load(self, spec: ModelSpec, checkpoint: Checkpoint, config: Any, others: object = None) -> None:
        """Nothing of a checkpoint is needed."""

    def choose(self, open_row: OpenRow, state: int, allowed: NDArray[np.bool_]) -> int:
        left = self._answer_of(open_row)
        while left and not allowed[left[0]] and bytes([left[0]]).isspace():
            left.pop(0)
        wanted = left[0] if left else END
        if allowed[wanted]:
            del left[:1]
            return wanted
        written = bytes(token for token in open_row.tokens[open_row.num_prompt_tokens :] if token < END).decode()
        self.forbidden.append(f"{written!r}, then {bytes(left[:40])!r}")
        return END if allowed[END] else int(np.argmax(allowed))

    def _answer_of(self, open_row: OpenRow) -> list[int]:
        known, left = self._left.get(id(open_row), (None, []))
        if known is not open_row:
            prompt = self.decode(open_row.tokens[: open_row.num_prompt_tokens])
            left = self.encode(answer_to(prompt, self._improvise))
            self._left[id(open_row)] = (open_row, left)
        return left

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < END).decode()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def close(self, row: int) -> None:
        self._left.pop(id(self.rows[row]), None)
        super().close(row)


def played_server(folder: Path, backend: PlayedBackend, names: Sequence[str] = NAMES) -> ServerThread:
    """A server of the model, to be started; its files lie in `folder`."""
    write_tiny_model(folder / "played.gguf", TEMPLATE, CONTEXT)
    config = EngineConfig(context_length=CONTEXT, max_running=16)
    settings = ServerSettings(max_body_bytes=4 << 20, max_stored_responses=100)
    return ServerThread(folder / "played.gguf", settings, config, CONTEXT, backend=backend, names=names)

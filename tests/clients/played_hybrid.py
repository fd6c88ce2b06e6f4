"""A played model whose layers have a state, and that notes what each request started from.

Marks of messages, reasoning and calls are tokens of its vocabulary, as they are in those of the models it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clients.played_model import CONTEXT, END, TEMPLATE, Improvise, PlayedBackend, no_script
from realizar.backends.base import ForwardInput
from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from scripted_backend import ScriptedStep
from server_thread import ServerThread
from step_inputs import rows_of
from tiny_model import write_tiny_model

BLOCK = 16
MARKS = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_TEXTS = {END: "<|im_end|>", **dict(enumerate(MARKS, END + 1))}
_IDS = {text: token_id for token_id, text in _TEXTS.items()}
_BETWEEN = re.compile("|".join(f"({re.escape(text)})" for text in _IDS))


@dataclass(frozen=True, slots=True)
class Run:
    """A request that has ended: its prompt, the tokens of it that were not computed again, and all of its tokens."""

    prompt: tuple[int, ...]
    num_cached: int
    tokens: tuple[int, ...]

    def num_shared(self, earlier: Sequence[Run]) -> int:
        """Tokens of the prompt but its last one that earlier requests have computed."""
        return max((num_common(self.prompt[:-1], each.tokens[:-1]) for each in earlier), default=0)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (first, second) in pairs if first != second), min(len(one), len(other)))


class PlayedHybrid(PlayedBackend):
    """Attributes: runs, in the order in which they ended."""

    def __init__(self, improvise: Improvise = no_script) -> None:
        super().__init__(improvise, num_snapshots=1024)
        self.runs: list[Run] = []
        self._starts: dict[int, int] = {}  # by row

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        for row in rows_of(forward_input):
            self._starts.setdefault(row.row, row.num_computed_tokens)
        return super().submit(forward_input)

    def close(self, row: int) -> None:
        ended = self.rows[row]
        prompt = tuple(ended.tokens[: ended.num_prompt_tokens])
        if row in self._starts:
            self.runs.append(Run(prompt, self._starts.pop(row), tuple(ended.tokens)))
        super().close(row)

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = (_TEXTS[token].encode() if token in _TEXTS else bytes([token]) for token in token_ids)
        return b"".join(parts).decode()

    def encode(self, text: str) -> list[int]:
        parts = (part for part in _BETWEEN.split(text) if part)
        return [token for part in parts for token in ([_IDS[part]] if part in _IDS else part.encode())]


def write_hybrid(path: Path) -> None:
    """The model's file; its weights are a real one's, of random numbers."""
    write_tiny_model(path, TEMPLATE.replace(_TEXTS[END], "<|end|>"), CONTEXT, "tiny-delta", MARKS)


def hybrid_server(folder: Path, backend: PlayedHybrid) -> ServerThread:
    """A server of the model, to be started; its files lie in `folder`."""
    write_hybrid(folder / "hybrid.gguf")
    config = EngineConfig(context_length=CONTEXT, max_running=16)
    settings = ServerSettings(max_body_bytes=4 << 20, max_stored_responses=100)
    return ServerThread(folder / "hybrid.gguf", settings, config, CONTEXT, backend=backend)

"""A scripted stand-in for `AsyncEngine`: it answers, refuses and fails by a script, at once and without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from realizar.engine.frontend.async_stream import AsyncStream, Embedding
from realizar.engine.frontend.outputs import ChoiceDelta, CompletionOutput, RequestOutput, Timings
from realizar.engine.stats import EngineStats
from realizar.errors import EngineDeadError, EngineUnavailableError, RealizarError
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.server.served_model import ServedModel
from realizar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScriptedCapacity:
    num_snapshots: int = 0


@dataclass(frozen=True)
class ScriptedInfo:
    vocab_size: int = 256
    hidden_size: int = 4
    max_request_tokens: int = 100_000
    max_running: int = 8
    cached_block_tokens: int = 16
    capacity: ScriptedCapacity = ScriptedCapacity()
    device: str = "cpu"
    device_label: str = "cpu"


class ScriptedChoice:
    """A choice that gains texts, each with a token, and notes its stream as an engine's choice does."""

    def __init__(self, stream: AsyncStream, index: int = 0, num_cached: int = 0) -> None:
        self._stream, self._index, self._num_cached = stream, index, num_cached
        self._gained: list[ChoiceDelta] = []

    def gain(self, text: str, **fields: Any) -> None:
        if not self._gained:
            self._stream.note(self.take_delta)
        fields["num_cached_tokens"] = self._num_cached
        self._gained.append(ChoiceDelta(self._stream.request_id, self._index, text, (65,), **fields))

    def take_delta(self) -> ChoiceDelta:
        gained, self._gained = self._gained, []
        return replace(
            gained[-1],
            text="".join(delta.text for delta in gained),
            token_ids=tuple(token_id for delta in gained for token_id in delta.token_ids),
            logprobs=tuple(entry for delta in gained for entry in delta.logprobs),
        )


@dataclass
class ScriptedEngine:
    """Gives `deltas` to every choice.

    Attributes:
        deltas: texts, each a token; an error among them is raised there; None waits for ever.
        refusal: what `generate` and `embed` raise.
        num_cached: tokens of every prompt that were in the cache.
        logprobs: of every token, where they are asked for.
        num_asked: requests so far. num_closed: streams that were closed before their end.
        num_cleared: times that the cache was cleared.
        device: the kind that its `info` names.
    """

    deltas: Sequence[str | RealizarError | None] = ("Hel", "lo")
    refusal: Exception | None = None
    state: str = "ready"
    fault: str | None = None
    pooling: str | None = None
    num_cached: int = 0
    logprobs: TokenLogprobs | None = None
    asked: list[tuple[tuple[int, ...], SamplingParams, dict[str, Any]]] = field(default_factory=list)
    num_asked: int = 0
    num_closed: int = 0
    num_cleared: int = 0
    device: str = "cpu"

    @property
    def info(self) -> ScriptedInfo:
        if self.state == "dead":
            raise EngineDeadError("the engine stopped at 0x7f0012345678 in /srv/engine.py")
        if self.state != "ready":
            raise EngineUnavailableError(f"the engine is {self.state}", 3.0)
        return ScriptedInfo(device=self.device)

    async def stats(self) -> EngineStats:
        return EngineStats(num_running=2, num_blocks=4, num_used_blocks=1, prefix_cache_hits=3, prompt_tokens=9)

    async def clear_cache(self) -> None:
        _ = self.info
        self.num_cleared += 1

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str, **options: Any
    ) -> AsyncStream:
        _ = self.info
        if self.refusal is not None:
            raise self.refusal
        self.num_asked += 1
        self.asked.append((tuple(prompt_token_ids), sampling, options))
        stream = AsyncStream(request_id, lambda: self._close(stream))
        asyncio.get_running_loop().call_soon(self._play, stream, tuple(prompt_token_ids), sampling)
        return stream

    async def embed(
        self, prompt_token_ids: Sequence[int], pooling: str, *, request_id: str, **options: Any
    ) -> Embedding:
        _ = self.info
        if self.refusal is not None:
            raise self.refusal
        self.num_asked += 1
        self.asked.append((tuple(prompt_token_ids), SamplingParams(), options))
        if None in self.deltas:
            try:
                await asyncio.sleep(3600)
            finally:
                self.num_closed += 1
        return Embedding((3.0, 0.0, 4.0, 0.0), len(prompt_token_ids), 0)

    def _close(self, stream: AsyncStream) -> None:
        self.num_closed += 1
        stream.end(RealizarError("the request was closed"))

    def _play(self, stream: AsyncStream, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        last = len(self.deltas) - 1
        choices = [ScriptedChoice(stream, index, self.num_cached) for index in range(sampling.n)]
        listed = () if sampling.logprobs is None or self.logprobs is None else (self.logprobs,)
        for place, text in enumerate(self.deltas):
            if text is None:
                return
            if isinstance(text, RealizarError):
                stream.end(text)
                return
            reason = "stop" if place == last else None
            for choice in choices:
                choice.gain(text, finish_reason=reason, logprobs=listed)
        texts = [text for text in self.deltas if isinstance(text, str)]
        whole = CompletionOutput(0, "".join(texts), (65,) * len(texts), "stop")
        timings = Timings(0.0, 0.1, 0.2, 0.3)
        outputs = (whole,) * sampling.n
        stream.end(RequestOutput(stream.request_id, None, prompt, outputs, timings, num_cached_tokens=self.num_cached))


class ByteTokenizer(Tokenizer):
    """A token per byte; id 0 is BOS and EOS."""

    vocab_size = 256
    bos_id = eos_id = 0
    eos_ids = special_ids = frozenset({0})
    add_bos = add_eos = adds_space_prefix = False
    special_texts = {"bos_token": "\0", "eos_token": "\0"}  # noqa: RUF012

    def __init__(self, template: str | None) -> None:
        self.chat_templates = {} if template is None else {"default": template}

    def token_bytes(self, index: int) -> bytes:
        return bytes([self.check_id(index)])

    def token_text(self, index: int) -> str:
        return chr(self.check_id(index))

    def control_texts(self) -> frozenset[str]:
        return frozenset()

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        return list((text.translate(restore) if restore else text).encode())


PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def scripted_model(template: str | None = PLAIN_TEMPLATE, names: Iterable[str] = ("scripted",)) -> ServedModel:
    """A model of bytes."""
    from realizar.tokenizer.templates.chat_template import ChatTemplate

    tokenizer = ByteTokenizer(template)
    made = None if template is None else ChatTemplate(tokenizer)
    return ServedModel(tuple(names), tokenizer, made, SamplingParams(), 100_000)


def events_of(text: str) -> Iterator[str]:
    """The data of a stream's events."""
    return (event.removeprefix("data: ") for event in text.split("\n\n") if event)

"""`AsyncLLM`: a model in this process for programs with an event loop. Its engine runs on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realizar.backends.load_progress import LoadProgress
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import ThreadLink
from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.clients.prompt_progress import ProgressReporter, PromptProgress, wanted_progress
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.llm_options import with_options
from realizar.engine.llm_prompts import Conversation, Prompt, PromptReader, PromptTokens, Samplings, Tools, unit_vectors
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import EngineDeadError, EngineUnavailableError, QueueFullError
from realizar.hub.progress import Progress, ignore_progress
from realizar.outputs import RequestOutput, TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Running:
    reader: PromptReader
    engine: AsyncEngine


class AsyncLLM:
    """The asynchronous twin of `LLM`, for one event loop. Use it as a context manager, or call `start` and `close`.

    Tasks may share it. Arguments and errors are those of `LLM`; options are checked at once; `start` loads the model.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        fetch_progress: Progress = ignore_progress,
        load_progress: LoadProgress | None = None,
        **options: Any,
    ) -> None:
        self._config = with_options(config, options, ("config", "chat_template", "fetch_progress", "load_progress"))
        self._model, self._chat_template = model, chat_template
        self._fetch_progress, self._load_progress = fetch_progress, load_progress
        self._running: _Running | None = None
        self._started = self._closed = False
        self._an_end = asyncio.Event()

    async def start(self) -> None:
        """Load the model, on a thread. Raises as `LLM`; EngineUnavailableError: it was called before."""
        if self._started:
            raise EngineUnavailableError("this AsyncLLM was started before; make a new one", 0.0)
        self._started = True
        checkpoint, reader = await asyncio.to_thread(self._read)
        engine = AsyncEngine(
            ThreadLink(self._loader(checkpoint, reader.tokenizer)),
            reader.new_text,
            reader.tokenizer.eos_ids,
            keeps_logprobs=True,
        )
        try:
            await engine.start()
            await engine.wait_ready()
        except BaseException:
            await engine.close()
            raise
        self._running = _Running(reader, engine)

    async def close(self) -> None:
        """Free the weights after the running step; open and later requests get EngineDeadError. Idempotent."""
        self._closed = True
        if self._running is not None:
            await self._running.engine.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        name = self._model.path.name if isinstance(self._model, Checkpoint) else str(self._model)
        if self._closed:
            return f"AsyncLLM({name!r}, closed)"
        if self._running is None:
            return f"AsyncLLM({name!r}, not loaded)"
        info = self._running.engine.info
        return f"AsyncLLM({name!r}, device={info.device_label!r}, context_length={info.max_request_tokens})"

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model_now().reader.tokenizer

    @property
    def max_request_tokens(self) -> int:
        return self._model_now().engine.info.max_request_tokens

    @property
    def default_sampling(self) -> SamplingParams:
        return self._model_now().reader.default_sampling

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Samplings = None,
        *,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; see `LLM.generate`. Where the task is cancelled, its requests end."""
        reader = self._model_now().reader
        found = await asyncio.to_thread(reader.prompts, prompts)
        return await self._run_all(found, sampling_params, wanted_progress(progress, use_tqdm))

    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncStream:
        """Complete one prompt: use `async with await llm.stream(...) as stream`, iterate it, await its `result`."""
        reader = self._model_now().reader
        return await self._stream(await asyncio.to_thread(reader.prompt, prompt), sampling_params)

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Samplings = None,
        *,
        tools: Tools = None,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        reader = self._model_now().reader
        found = await asyncio.to_thread(reader.chats, messages, tools, variables)
        return await self._run_all(found, sampling_params, wanted_progress(progress, use_tqdm))

    async def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        **variables: Any,
    ) -> AsyncStream:
        """Answer one conversation as a stream; see `stream`."""
        reader = self._model_now().reader
        return await self._stream(await asyncio.to_thread(reader.chat, messages, tools, variables), sampling_params)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
    ) -> NDArray[np.float32]:
        """Embed prompts: float32 [prompts, hidden_size]; see `LLM.embed`."""
        reader = self._model_now().reader
        wanted, found = reader.pooling(pooling), await asyncio.to_thread(reader.prompts, prompts)
        outputs = await self._run_all(found, SamplingParams(), wanted_progress(progress, use_tqdm), pooling=wanted)
        return unit_vectors([output.pooled for output in outputs], self._model_now().engine.info.hidden_size)

    async def score(self, prompt: Prompt, top_n: int = 0) -> list[TokenLogprobs | None]:
        found = await asyncio.to_thread(self._model_now().reader.prompt, prompt)
        sampling = SamplingParams(prompt_logprobs=top_n)
        outputs = await self._run_all([found], sampling, progress=False, score_only=True)
        return list(outputs[0].prompt_logprobs or ())

    def _read(self) -> tuple[Checkpoint, PromptReader]:
        model = self._model
        checkpoint = model if isinstance(model, Checkpoint) else find_checkpoint(model, self._fetch_progress)
        return checkpoint, PromptReader(checkpoint, self._chat_template)

    def _loader(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Callable[[LoadProgress], EngineCore]:
        def load(report: LoadProgress) -> EngineCore:
            progress = self._load_progress or report
            return load_core(checkpoint, self._config, progress=progress, tokenizer=tokenizer)

        return load

    def _model_now(self) -> _Running:
        """It raises EngineUnavailableError where no model is loaded yet, and EngineDeadError where it was closed."""
        if self._closed:
            raise EngineDeadError("the engine was closed; make a new AsyncLLM")
        if self._running is None:
            raise EngineUnavailableError("the model is not loaded: use `async with`, or await start()", 0.0)
        return self._running

    async def _stream(self, prompt: PromptTokens, sampling: SamplingParams | None) -> AsyncStream:
        wanted = self._model_now().reader.samplings(sampling, 1)[0]
        return await self._submit_in_turn(prompt, wanted, keep_deltas=True)

    async def _run_all(
        self,
        prompts: Sequence[PromptTokens],
        sampling_params: Samplings,
        progress: PromptProgress | bool | None,
        **kinds: Any,
    ) -> list[RequestOutput]:
        """Run prompts in the order given, as many at once as the engine queues; all end where one fails."""
        wanted = self._model_now().reader.samplings(sampling_params, len(prompts))
        streams: list[AsyncStream] = []
        reporter = ProgressReporter(progress, streams, len(prompts))
        try:
            for prompt, sampling in zip(prompts, wanted, strict=True):
                stream = await self._submit_in_turn(prompt, sampling, keep_deltas=False, **kinds)
                stream.when_done(reporter.step)
                streams.append(stream)
            outputs = [await stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        reporter.end()
        return outputs

    async def _submit_in_turn(self, prompt: PromptTokens, sampling: SamplingParams, **kinds: Any) -> AsyncStream:
        """Queue a prompt; where the queue is full, wait until an open request has ended.

        It raises QueueFullError if it has no room though nothing is open.
        """
        while True:
            engine = self._model_now().engine
            try:
                stream = await engine.generate(
                    prompt.token_ids, sampling, prompt=prompt.text, embeddings=prompt.embeddings, **kinds
                )
            except QueueFullError:
                if not engine.num_open:
                    self._note_end()  # others may have waited for this one
                    raise
                await self._an_end.wait()
            except BaseException:
                self._note_end()
                raise
            else:
                stream.when_done(self._note_end)
                return stream

    def _note_end(self) -> None:
        self._an_end.set()
        self._an_end = asyncio.Event()

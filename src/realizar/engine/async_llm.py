"""`AsyncLLM`: a model in this process for programs with an event loop. Its engine runs on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realizar.backends.load_progress import LoadProgress
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import ThreadLink
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import RequestOutput
from realizar.engine.frontend.prompt_progress import PromptProgress, wanted_progress
from realizar.engine.llm_options import with_options
from realizar.engine.llm_prompts import Conversation, Prompt, PromptReader, Samplings, Tools, unit_vectors
from realizar.engine.llm_requests import ModelRequests
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import EngineDeadError, EngineUnavailableError
from realizar.hub.progress import Progress, ignore_progress
from realizar.outputs import TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.tokenizer import Tokenizer


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
        self._running: ModelRequests | None = None
        self._started = self._closed = False

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
        self._running = ModelRequests(reader, engine)

    async def close(self) -> None:
        """Free the weights after the running step; open and later requests get EngineDeadError. Idempotent."""
        self._closed = True
        if self._running is not None:
            await self._running.engine.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
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
        found = await asyncio.to_thread(self._model_now().reader.prompts, prompts)
        return await self._model_now().run_all(found, sampling_params, wanted_progress(progress, use_tqdm))

    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncStream:
        """Complete one prompt: use `async with await llm.stream(...) as stream`, iterate it, await its `result`."""
        found = await asyncio.to_thread(self._model_now().reader.prompt, prompt)
        return await self._model_now().stream(found, sampling_params)

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
        reader, most = self._model_now().reader, self.max_request_tokens
        found = await asyncio.to_thread(reader.chats, messages, tools, variables, most)
        return await self._model_now().run_all(found, sampling_params, wanted_progress(progress, use_tqdm))

    async def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        **variables: Any,
    ) -> AsyncStream:
        """Answer one conversation as a stream; see `stream`."""
        reader, most = self._model_now().reader, self.max_request_tokens
        found = await asyncio.to_thread(reader.chat, messages, tools, variables, most)
        return await self._model_now().stream(found, sampling_params)

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
        outputs = await self._model_now().run_all(
            found, SamplingParams(), wanted_progress(progress, use_tqdm), pooling=wanted
        )
        return unit_vectors([output.pooled for output in outputs], self._model_now().engine.info.hidden_size)

    async def score(self, prompt: Prompt, top_n: int = 0) -> list[TokenLogprobs | None]:
        found = await asyncio.to_thread(self._model_now().reader.prompt, prompt)
        sampling = SamplingParams(prompt_logprobs=top_n)
        outputs = await self._model_now().run_all([found], sampling, progress=False, score_only=True)
        return list(outputs[0].prompt_logprobs or ())

    def _read(self) -> tuple[Checkpoint, PromptReader]:
        model = self._model
        if not isinstance(model, Checkpoint):
            model = find_checkpoint(model, self._fetch_progress, mmproj=self._config.mmproj)
        return model, PromptReader(model, self._chat_template, self._config)

    def _loader(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Callable[[LoadProgress], EngineCore]:
        def load(report: LoadProgress) -> EngineCore:
            progress = self._load_progress or report
            return load_core(checkpoint, self._config, progress=progress, tokenizer=tokenizer)

        return load

    def _model_now(self) -> ModelRequests:
        """It raises EngineUnavailableError where no model is loaded yet, and EngineDeadError where it was closed."""
        if self._closed:
            raise EngineDeadError("the engine was closed; make a new AsyncLLM")
        if self._running is None:
            raise EngineUnavailableError("the model is not loaded: use `async with`, or await start()", 0.0)
        return self._running

"""`ModelRequests` runs the prompts of `LLM` and `AsyncLLM`, as many at once as the engine queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import RequestOutput
from realizar.engine.frontend.prompt_progress import ProgressReporter, PromptProgress
from realizar.engine.frontend.tasks import Changes
from realizar.engine.llm_prompts import PromptReader, PromptTokens, Samplings
from realizar.errors import QueueFullError
from realizar.sampling_params import SamplingParams


class ModelRequests:
    """Everything runs on the engine's event loop."""

    def __init__(self, reader: PromptReader, engine: AsyncEngine) -> None:
        self.reader, self.engine = reader, engine
        self._ends = Changes()

    async def stream(self, prompt: PromptTokens, sampling: SamplingParams | None) -> AsyncStream:
        """Queue one prompt. Raises as `AsyncEngine.generate`."""
        return await self._submit_in_turn(prompt, self.reader.samplings(sampling, 1)[0], keep_deltas=True)

    async def run_all(
        self,
        prompts: Sequence[PromptTokens],
        sampling_params: Samplings,
        progress: PromptProgress | bool | None,
        **kinds: Any,
    ) -> list[RequestOutput]:
        """Run prompts in the order given; all end where one fails. `kinds` are as of `AsyncEngine.generate`."""
        wanted = self.reader.samplings(sampling_params, len(prompts))
        streams: list[AsyncStream] = []
        reporter = ProgressReporter(progress, streams, len(prompts))
        reporting = asyncio.create_task(reporter.run())
        try:
            for prompt, sampling in zip(prompts, wanted, strict=True):
                streams.append(await self._submit_in_turn(prompt, sampling, keep_deltas=False, **kinds))
            outputs = [await stream.result() for stream in streams]
        finally:
            reporting.cancel()
            for stream in streams:
                stream.close()
        reporter.end()
        return outputs

    async def _submit_in_turn(self, prompt: PromptTokens, sampling: SamplingParams, **kinds: Any) -> AsyncStream:
        """Queue a prompt; where there is no room for it or its grammar, wait until an open request has ended.

        It raises QueueFullError if it has no room though nothing is open.
        """
        while True:
            an_end = self._ends.next
            try:
                stream = await self.engine.generate(
                    prompt.token_ids, sampling, prompt=prompt.text, embeddings=prompt.embeddings,
                    rope_positions=prompt.rope_positions, **kinds,
                )  # fmt: skip
            except QueueFullError:
                if not self.engine.num_open and not an_end.is_set():
                    self._ends.note()  # others may have waited for this one
                    raise
                await an_end.wait()
            except BaseException:
                self._ends.note()
                raise
            else:
                stream.when_done(self._ends.note)
                return stream

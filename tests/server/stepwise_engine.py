"""A scripted engine whose tokens spell its answer, and whose deltas are read one by one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import ChoiceDelta, CompletionOutput, RequestOutput, Timings
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.stop_checker import StopChecker
from server.scripted_engine import ByteTokenizer, ScriptedEngine

END = b"\0"


@dataclass
class StepwiseEngine(ScriptedEngine):
    """Generates the bytes of `answer` and the id that ends it, `step` tokens a delta, up to the request's stop."""

    answer: str = ""
    step: int = 1

    def _play(self, stream: AsyncStream, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        self._task = asyncio.ensure_future(self._answer(stream, prompt, sampling))

    async def _answer(self, stream: AsyncStream, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        ids = (*self.answer.encode(), *END)[: sampling.max_tokens]
        stops = [StopChecker(ByteTokenizer(None), sampling, END) for _ in range(sampling.n)]
        for start in range(0, len(ids), self.step):
            for index, stop in enumerate(stops):
                if stop.finish_reason is None and not stream.done:
                    delta = _Delta(self._delta(stream, index, ids, start, stop, sampling))
                    stream.note(delta.take)
                    while not delta.taken and not stream.done:  # noqa: ASYNC110 - the stream has no event for it
                        await asyncio.sleep(0)
        whole = CompletionOutput(0, self.answer, ids, "stop")
        times = Timings(0.0, 0.1, 0.2, 0.3)
        stream.end(RequestOutput(stream.request_id, None, prompt, (whole,) * sampling.n, times))

    def _delta(
        self,
        stream: AsyncStream,
        index: int,
        ids: tuple[int, ...],
        start: int,
        stop: StopChecker,
        sampling: SamplingParams,
    ) -> ChoiceDelta:
        gained = ids[start : start + self.step]
        made = ChoiceDelta(stream.request_id, index, stop.add(gained), gained)
        if sampling.logprobs is not None:
            made = replace(made, logprobs=tuple(TokenLogprobs(each, -0.5, 1, ((each, -0.5),)) for each in gained))
        if stop.finish_reason is not None:
            return replace(made, finish_reason="stop", stop_reason=stop.stop_string)
        if start + self.step >= len(ids):
            return replace(made, text=made.text + stop.finish(), finish_reason="length")
        return made


class _Delta:
    """What a stream reads once. Attributes: taken: True once it was read."""

    def __init__(self, delta: ChoiceDelta) -> None:
        self._delta, self.taken = delta, False

    def take(self) -> ChoiceDelta:
        self.taken = True
        return self._delta

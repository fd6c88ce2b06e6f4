"""Streams, refusals, aborts and death through `AsyncEngine`, with a scripted engine on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from number_text import NumberText, spelled
from realizar.backends.base import ForwardInput
from realizar.backends.load_progress import LoadProgress
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import ThreadLink
from realizar.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RealizarError,
    RequestFailedError,
)
from realizar.outputs import SnapshotUse
from realizar.request import Client
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens, make_spec
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=200)


class GatedBackend(ScriptedBackend):
    """A scripted backend whose steps wait while `gate` is closed, and say so by `waits`.

    Args:
        closes_after: steps after which the gate closes by itself.
    """

    def __init__(self, closes_after: int | None = None, **limits: Any) -> None:
        super().__init__(**limits)
        self.closes_after = closes_after
        self.gate, self.waits = threading.Event(), threading.Event()
        self.gate.set()

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self.num_steps == self.closes_after:
            self.gate.clear()
        if not self.gate.is_set():
            self.waits.set()
        assert self.gate.wait(HANG_S)
        return super().submit(forward_input)


def loader(backend: ScriptedBackend) -> Callable[[LoadProgress], EngineCore]:
    def load(progress: LoadProgress) -> EngineCore:
        progress("weights", 1.0)
        spec = make_spec(backend.windows, has_state=backend.has_state)
        return new_core(backend, spec, EngineConfig(max_step_tokens=1000))

    return load


@asynccontextmanager
async def running(backend: ScriptedBackend, max_queued: int | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(ThreadLink(loader(backend)), NumberText, max_queued=max_queued)
    await engine.start()
    try:
        await asyncio.wait_for(engine.wait_ready(), HANG_S)
        yield engine
    finally:
        await engine.close()
    assert backend.down


def test_conversations_start_after_the_messages_of_others() -> None:
    """Where the model has a state, that is where a snapshot of it was taken; the end of each answer has one too."""

    async def main() -> None:
        backend = ScriptedBackend(num_snapshots=8)
        engine = AsyncEngine(ThreadLink(loader(backend)), NumberText, end_ids=(96,))
        await engine.start()
        await asyncio.wait_for(engine.wait_ready(), HANG_S)
        sampling = replace(GREEDY, ignore_eos=True)
        for user, cached, used in (
            ((40, 41, 42), 0, SnapshotUse(taken=3)),
            ((50, 51, 52, 53, 54), 28, SnapshotUse(restored=1, taken=2)),
        ):
            output = await (await engine.generate((*range(30), 96, *user, 96, 95), sampling)).result()
            assert (output.num_cached_tokens, output.snapshots) == (cached, used)
        stats = await engine.stats()
        assert (stats.snapshots_taken, stats.snapshots_restored, stats.snapshots_dropped) == (5, 1, 0)
        assert stats.num_snapshots == 5
        await engine.close()

    asyncio.run(main())


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing is open in the engine, and audit its KV blocks."""
    async with asyncio.timeout(HANG_S):
        while (stats := await engine.stats()).num_running or stats.num_waiting:
            pass
    assert await engine.audit() is None


def test_deltas_concatenate_to_the_whole() -> None:
    async def main() -> None:
        wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
        async with running(ScriptedBackend()) as engine:
            assert engine.state == "ready"
            assert engine.info.vocab_size == 97
            async with await engine.generate([1, 2], GREEDY, prompt="one two") as stream:
                deltas = [delta async for delta in stream]
                output = await stream.result()
            assert "".join(delta.text for delta in deltas) == output.outputs[0].text == spelled(wanted)
            assert deltas[-1].finish_reason == "length"
            assert (output.prompt, output.prompt_token_ids) == ("one two", (1, 2))
            stats = await engine.stats()
            assert (stats.prompt_tokens, stats.generation_tokens, stats.num_running) == (2, 8, 0)
            assert stats.num_steps == 8
            await settled(engine)

    asyncio.run(main())


def test_figures_that_are_asked_for_as_the_engine_ends_are_the_last_known() -> None:
    async def main() -> None:
        async with running(ScriptedBackend()) as engine:
            await (await engine.generate([1, 2], GREEDY)).result()
            known = await engine.stats()
            asked = asyncio.create_task(engine.stats())
            await asyncio.sleep(0)
            await engine.close()
            assert (await asked).generation_tokens == known.generation_tokens == 8

    asyncio.run(main())


def test_many_at_once_get_what_each_gets_alone() -> None:
    async def one(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        sampling = replace(GREEDY, n=2, seed=3, temperature=1.0)
        output = await (await engine.generate(prompt, sampling, keep_deltas=False)).result()
        assert [choice.index for choice in output.outputs] == [0, 1]
        for choice in output.outputs:
            assert list(choice.token_ids) == expected_tokens(prompt, (None,), sampling, 8, choice.index)
        return prompt

    async def main() -> None:
        async with running(ScriptedBackend(num_blocks=(40,))) as engine:
            prompts = [[number, number + 1, 5] for number in range(16)]
            assert await asyncio.gather(*(one(engine, prompt) for prompt in prompts)) == prompts
            await settled(engine)

    asyncio.run(main())


def test_a_slow_consumer_gets_joined_deltas() -> None:
    async def main() -> None:
        async with running(ScriptedBackend()) as engine, await engine.generate([1, 2], GREEDY) as stream:
            output = await stream.result()
            deltas = [delta async for delta in stream]
            assert [delta.text for delta in deltas] == [output.outputs[0].text]
            assert deltas[0].token_ids == output.outputs[0].token_ids
            assert deltas[0].finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["close", "leave", "cancel"])
def test_a_consumer_that_stops_frees_its_blocks(how: str) -> None:
    """It goes while the engine is in the fourth of 200 steps."""

    async def main() -> None:
        backend = GatedBackend(closes_after=3)
        async with running(backend) as engine:
            stream = await engine.generate([1, 2], LONG)
            await anext(aiter(stream))
            if how == "close":
                stream.close()
                stream.close()
            elif how == "leave":
                async with stream:
                    pass
            else:
                task = asyncio.create_task(_read(engine))
                await asyncio.sleep(0)
                task.cancel()
                stream.close()
            backend.closes_after = None
            backend.gate.set()
            with pytest.raises(RealizarError, match="closed"):
                await stream.result()
            await settled(engine)
            assert (await (await engine.generate([3], GREEDY)).result()).num_generated_tokens == 8

    async def _read(engine: AsyncEngine) -> None:
        async with await engine.generate([7, 8], LONG) as stream:
            await stream.result()

    asyncio.run(main())


def test_cancelled_before_it_is_accepted() -> None:
    async def main() -> None:
        backend = GatedBackend()
        async with running(backend) as engine:
            backend.gate.clear()
            first = await engine.generate([1, 2], GREEDY)
            await asyncio.to_thread(backend.waits.wait, HANG_S)  # the engine is in a step now, and reads nothing
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.generate([3, 4], LONG), 0.02)
            backend.gate.set()
            assert (await first.result()).num_generated_tokens == 8
            await settled(engine)

    asyncio.run(main())


def test_a_stop_string_ends_the_row_too() -> None:
    async def main() -> None:
        wanted = expected_tokens([1, 2], (None,), LONG, 8)
        async with running(ScriptedBackend()) as engine:
            stream = await engine.generate([1, 2], replace(LONG, stop=(f"{wanted[3]} ",)))
            output = (await stream.result()).outputs[0]
            assert (output.text, output.finish_reason) == (spelled(wanted[:3]), "stop")
            await settled(engine)

    asyncio.run(main())


def test_refusals_are_raised_and_leave_nothing() -> None:
    async def main() -> None:
        backend = GatedBackend(num_blocks=(8,))
        async with running(backend) as engine:
            for prompt, sampling, error in (
                ([], GREEDY, InvalidRequestError),
                ([97], GREEDY, InvalidRequestError),
                ([1] * 300, GREEDY, ContextLengthError),
                ([1] * 40, GREEDY, CapacityError),
                ([1], replace(GREEDY, n=100), InvalidRequestError),
            ):
                with pytest.raises(error):
                    await engine.generate(prompt, sampling)
            backend.gate.clear()
            open_one = await engine.generate([1], GREEDY, request_id="mine")
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.generate([1], GREEDY, request_id="mine")
            backend.gate.set()
            await open_one.result()
            await settled(engine)

    asyncio.run(main())


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        backend = GatedBackend(max_rows=2)
        async with running(backend, max_queued=3) as engine:
            backend.gate.clear()
            tasks = [asyncio.create_task(engine.generate([number], GREEDY)) for number in range(5)]
            await asyncio.sleep(0)  # all have asked
            with pytest.raises(QueueFullError) as caught:
                await engine.generate([1], GREEDY)
            assert 1 <= caught.value.retry_after_s <= 60
            backend.gate.set()
            outputs = [await stream.result() for stream in await asyncio.gather(*tasks)]
            assert [output.num_generated_tokens for output in outputs] == [8] * 5
            assert (await (await engine.generate([1], GREEDY)).result()).num_generated_tokens == 8

    asyncio.run(main())


def test_a_full_queue_of_one_client_keeps_no_other_out() -> None:
    """Of 100 others each is let in, and its request starts after at most one more of those that wait."""

    async def main() -> None:
        backend = GatedBackend(max_rows=1)
        greedy = Client("greedy")
        ended: list[str] = []

        async def ask(client: Client) -> None:
            async with await engine.generate([1], replace(GREEDY, max_tokens=1), client=client) as stream:
                await stream.result()
                ended.append(client.name)

        async with running(backend, max_queued=63) as engine:
            backend.gate.clear()
            tasks = [asyncio.create_task(ask(greedy)) for _ in range(64)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await engine.generate([1], GREEDY, client=greedy)
            tasks += [asyncio.create_task(ask(Client(f"{number}"))) for number in range(100)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await engine.embed([1], client=greedy)
            backend.gate.set()
            await asyncio.gather(*tasks)
            assert len(ended) == 164
            assert ended[:103].count("greedy") <= 3
            assert (await (await engine.generate([1], GREEDY, client=greedy)).result()).num_generated_tokens == 8

    asyncio.run(main())


def test_clients_with_caches_of_their_own_find_nothing_of_others() -> None:
    async def main() -> None:
        prompt = [*range(64)]
        both = replace(GREEDY, max_tokens=1)

        async def cached(client: Client, salt: str | None = None) -> list[int]:
            output = await (await engine.generate(prompt, both, client=client, cache_salt=salt)).result()
            return [output.num_cached_tokens, (await engine.embed(prompt, "last", client=client)).num_cached_tokens]

        async with running(ScriptedBackend()) as engine:
            one, two = (Client(name, has_own_cache=True) for name in ("one", "two"))
            assert [await cached(client) for client in (one, two)] == [[0, 60], [0, 60]]
            assert [await cached(client) for client in (one, two)] == [[60, 60], [60, 60]]
            assert await cached(one, "salt") == [0, 60]
            assert await cached(two, "salt") == [0, 60]
            assert await cached(two, "salt") == [60, 60]
            assert [await cached(Client(name)) for name in "ab"] == [[0, 60], [60, 60]]

    asyncio.run(main())


def test_a_dead_engine_reaches_every_waiter() -> None:
    async def one(engine: AsyncEngine, number: int) -> None:
        async with await engine.generate([number], LONG) as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        async with running(ScriptedBackend(fail_at=5)) as engine:
            async with asyncio.timeout(HANG_S):
                ends = await asyncio.gather(*(one(engine, number) for number in range(5)), return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDeadError] * 5
            assert {str(end) for end in ends} == {"the engine stopped: RuntimeError: the device fell off the bus"}
            assert engine.state == "dead"
            with pytest.raises(EngineDeadError, match="fell off the bus"):
                await engine.generate([1], GREEDY)
            assert isinstance(await engine.wait_dead(), EngineDeadError)

    asyncio.run(main())


def test_an_engine_that_can_not_load_says_why() -> None:
    def fail(progress: LoadProgress) -> EngineCore:
        raise CapacityError("the weights do not fit")

    async def main() -> None:
        engine = AsyncEngine(ThreadLink(fail), NumberText)
        with pytest.raises(EngineUnavailableError):
            await engine.generate([1], GREEDY)
        await engine.start()
        with pytest.raises(CapacityError, match="do not fit"):
            await asyncio.wait_for(engine.wait_ready(), HANG_S)
        with pytest.raises(EngineDeadError, match="do not fit"):
            await engine.generate([1], GREEDY)
        await engine.close()

    asyncio.run(main())


def test_draining_ends_what_is_open_and_takes_no_more() -> None:
    async def main() -> None:
        backend = GatedBackend()
        async with running(backend) as engine:
            backend.gate.clear()
            stream = await engine.generate([1, 2], GREEDY)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailableError, match="shutting down"):
                await engine.generate([1], GREEDY)
            assert not draining.done()
            backend.gate.set()
            await asyncio.wait_for(draining, HANG_S)
            assert (await stream.result()).num_generated_tokens == 8

    asyncio.run(main())


def test_closing_ends_what_is_open() -> None:
    async def main() -> None:
        backend = GatedBackend(closes_after=3)
        async with running(backend) as engine:
            stream = await engine.generate([1, 2], LONG)
            await asyncio.to_thread(backend.waits.wait, HANG_S)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            backend.closes_after = None
            backend.gate.set()
            await closing
        with pytest.raises(EngineDeadError, match="closed"):
            await stream.result()

    asyncio.run(main())


def test_text_that_fails_ends_one_request_alone() -> None:
    async def main() -> None:
        async with running(ScriptedBackend()) as engine:
            good = await engine.generate([1, 2], GREEDY)
            bad = await engine.generate([1, 2], replace(GREEDY, stop=("?",)))
            with pytest.raises(RequestFailedError, match="could not be turned into text"):
                await bad.result()
            assert (await good.result()).num_generated_tokens == 8
            await settled(engine)

    asyncio.run(main())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_backends_vector(pooling: Literal["last", "mean"]) -> None:
    async def main() -> None:
        prompt = list(range(40))
        async with running(ScriptedBackend()) as engine:
            first = await engine.embed(prompt, pooling)
            again, other = await asyncio.gather(engine.embed(prompt, pooling), engine.embed([1, *prompt[1:]], pooling))
            assert again.vector == first.vector != other.vector
            assert (first.num_prompt_tokens, first.num_cached_tokens) == (40, 0)
            with pytest.raises(InvalidRequestError, match="empty"):
                await engine.embed([], pooling)
            await settled(engine)

    asyncio.run(main())


def test_a_prefix_is_shared_and_said() -> None:
    async def main() -> None:
        prompt = list(range(50))
        async with running(ScriptedBackend()) as engine:
            outputs = [await (await engine.generate(prompt, GREEDY)).result() for _ in range(2)]
            salted = await (await engine.generate(prompt, GREEDY, cache_salt="mine")).result()
            assert [output.num_cached_tokens for output in (*outputs, salted)] == [0, 48, 0]
            assert outputs[0].outputs == outputs[1].outputs == salted.outputs
            stats = await engine.stats()
            assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (150, 48)
            assert (stats.num_used_blocks, stats.kv_cache_usage) == (0, 0)

    asyncio.run(main())

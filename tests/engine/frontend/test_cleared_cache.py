"""A prefix cache that is cleared while requests run: of an engine on a thread, and of one in another process."""

from __future__ import annotations

import asyncio

import pytest

from engine.frontend.test_async_engine import GREEDY, LONG, GatedBackend, running, settled
from engine.process.test_engine_process import running as in_a_process
from number_text import spelled
from realizar.errors import EngineDeadError
from scripted_backend import expected_tokens
from waits import HANG_S


@pytest.mark.parametrize("num_snapshots", [None, 8])
def test_a_cleared_cache_gives_nothing_and_requests_that_run_go_on(num_snapshots: int | None) -> None:
    """Also that of a model with a state."""

    async def main() -> None:
        backend = GatedBackend(closes_after=3, num_snapshots=num_snapshots)
        async with running(backend) as engine:
            prompt = [*range(30), *range(20)]
            first = await engine.generate(prompt, LONG)
            assert await asyncio.to_thread(backend.waits.wait, HANG_S)
            clearing = asyncio.create_task(engine.clear_cache())
            await asyncio.sleep(0)
            backend.closes_after = None
            backend.gate.set()
            await clearing
            again = await (await engine.generate(prompt, GREEDY)).result()
            assert again.num_cached_tokens == 0
            assert (await first.result()).outputs[0].text == spelled(
                expected_tokens(prompt, (None,), LONG, 200, has_state=bool(num_snapshots))
            )
            found = [await (await engine.generate(prompt, GREEDY)).result() for _ in range(2)]
            assert found[1].num_cached_tokens > 0
            await engine.clear_cache()
            assert (await engine.stats()).num_snapshots == 0
            assert (await (await engine.generate(prompt, GREEDY)).result()).num_cached_tokens == 0
            await settled(engine)
        with pytest.raises(EngineDeadError):
            await engine.clear_cache()

    asyncio.run(main())


def test_a_cleared_cache_in_another_process_is_empty() -> None:
    async def main() -> None:
        async with in_a_process() as engine:
            for cached in (0, 96, None, 0, 96):
                if cached is None:
                    await engine.clear_cache()
                    continue
                output = await (await engine.generate(range(90, 0, -1), GREEDY)).result()
                assert output.num_cached_tokens == min(cached, 88)
            await settled(engine)

    asyncio.run(main())

"""Figures of models that take turns: over all their engines, and while one is unloaded."""

from __future__ import annotations

import asyncio

from realizar.engine.stats import EngineStats
from server.models.shelf_case import Case, run


def test_metrics_and_states_by_model() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b", "c")
        text = (await case.shelf.exposition(())).decode()
        assert 'realizar:model_state{model_name="c",state="ready"} 1.0' in text
        assert 'realizar:model_loads_total{model_name="b"} 1.0' in text
        assert 'realizar:prompt_tokens_total{model_name="c"} 9.0' in text
        assert text.count("# TYPE realizar:prompt_tokens_total counter") == 1
        await case.use("a", "b", "c")
        text = (await case.shelf.exposition(())).decode()
        assert 'realizar:prompt_tokens_total{model_name="a"} 18.0' in text  # of two engines that have ended
        assert 'realizar:model_planned_bytes{model_name="a"} 0.0' in text
        assert await case.shelf.audits() == {"c": None}

    run(main, bound=1)


def test_an_engine_that_is_unloaded_during_a_scrape_counts_once() -> None:
    async def main(case: Case) -> None:
        await case.use("a")
        engine, asked, answer = case.loader.engines["a"], asyncio.Event(), asyncio.Event()
        stats = await engine.stats()

        async def slow_stats() -> EngineStats:
            if not asked.is_set():  # the scrape, and not the unload
                asked.set()
                await answer.wait()
            return stats

        engine.stats = slow_stats  # type: ignore[method-assign]
        scrape = asyncio.create_task(case.shelf.exposition(()))
        await asked.wait()
        (await case.lease("a", keep_alive_s=0)).release()
        await case.until("a", "known")
        answer.set()
        assert 'realizar:prompt_tokens_total{model_name="a"} 9.0' in (await scrape).decode()

    run(main)

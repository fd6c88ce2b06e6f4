"""Requests that were open when engines died are identified by their content and distinguished by their deaths."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from realizar.engine.frontend.suspects import Suspects, fingerprint
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.errors import InvalidRequestError, QueueFullError
from realizar.request import Client, Request
from realizar.sampling_params import SamplingParams, StructuredOutput

POISON = Request("poison", (1, 77), SamplingParams(), 8)
OTHERS = [Request(str(number), (number,), SamplingParams(), 8) for number in range(3)]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def admitted(suspects: Suspects, request: Request) -> bool:
    """True if the request runs at once; it ends at once too."""
    try:
        (await asyncio.wait_for(suspects.admit(request), 0.01))()
    except TimeoutError:
        return False
    return True


def test_content_is_what_counts() -> None:
    again = replace(
        POISON, request_id="x", arrival_s=0.0, priority=3, client=Client("y"), sampling=SamplingParams(seed=5)
    )
    assert fingerprint(again) == fingerprint(POISON)
    grammar = StructuredOutput("regex", "a")
    given = prompt_embeddings([[1.0, 2.0]])
    changes = [
        replace(POISON, prompt_token_ids=(1, 78)),
        replace(POISON, max_tokens=9),
        replace(POISON, pooling="last", max_tokens=0),
        replace(POISON, sampling=SamplingParams(top_k=3)),
        replace(POISON, sampling=SamplingParams(logit_bias={3: 1.0})),
        replace(POISON, sampling=SamplingParams(structured=grammar)),
        replace(POISON, embeddings=(given,)),
        replace(POISON, embeddings=(prompt_embeddings([[1.0, 2.5]]),)),
        replace(POISON, embeddings=(replace(given, start=1),)),
    ]
    assert len({fingerprint(each) for each in (POISON, *changes)}) == 10


def test_one_shared_death_keeps_nobody_out() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.note_death([POISON, *OTHERS])
        releases = [await suspects.admit(each) for each in (POISON, *OTHERS)]
        assert len(releases) == 4

    asyncio.run(main())


def test_copies_of_one_request_count_once_a_death() -> None:
    """Many clients may ask the same; one death of an engine they shared refuses none of them."""

    async def main() -> None:
        suspects = Suspects()
        copies = [replace(POISON, request_id=str(number)) for number in range(4)]
        suspects.note_death(copies)
        releases = [await suspects.admit(each) for each in copies]
        assert len(releases) == 4

    asyncio.run(main())


def test_after_two_deaths_each_runs_apart_and_the_third_identifies_it() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.note_death([POISON, *OTHERS])
        suspects.note_death([POISON, *OTHERS[:2]])
        release = await suspects.admit(OTHERS[0])
        assert not await admitted(suspects, POISON)
        assert await admitted(suspects, OTHERS[2])  # was in one alone
        release()
        suspects.clear(OTHERS[0])
        assert await admitted(suspects, OTHERS[0])
        release = await suspects.admit(POISON)
        waiting = asyncio.ensure_future(suspects.admit(OTHERS[1]))
        await asyncio.sleep(0)
        suspects.note_death([POISON, OTHERS[2]])
        release()
        (await waiting)()
        with pytest.raises(InvalidRequestError, match="stopped each time"):
            await suspects.admit(POISON)
        assert await admitted(suspects, OTHERS[2])

    asyncio.run(main())


def test_alone_in_a_death_counts_twice() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.note_death([POISON])
        assert await admitted(suspects, POISON)
        suspects.note_death([POISON])
        with pytest.raises(InvalidRequestError):
            await suspects.admit(POISON)

    asyncio.run(main())


def test_a_suspect_that_waits_while_its_like_kills_is_refused() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.note_death([POISON])
        release = await suspects.admit(POISON)
        waiting = asyncio.ensure_future(suspects.admit(replace(POISON, request_id="twin")))
        await asyncio.sleep(0)
        suspects.note_death([POISON])
        release()
        with pytest.raises(InvalidRequestError):
            await waiting
        suspects.note_death([OTHERS[0]])
        assert await admitted(suspects, OTHERS[0])  # nobody holds the turn

    asyncio.run(main())


def test_a_waiting_request_that_is_aborted_holds_up_nobody() -> None:
    async def main() -> None:
        suspects = Suspects()
        for each in OTHERS:
            suspects.note_death([each])
        release = await suspects.admit(OTHERS[0])
        waiting = asyncio.ensure_future(suspects.admit(OTHERS[1]))
        await asyncio.sleep(0)
        waiting.cancel()
        release()
        assert await admitted(suspects, OTHERS[2])

    asyncio.run(main())


def test_few_wait() -> None:
    async def main() -> None:
        suspects = Suspects()
        suspects.note_death([POISON])
        release = await suspects.admit(POISON)
        waiting = [asyncio.ensure_future(suspects.admit(POISON)) for _ in range(64)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await suspects.admit(POISON)
        for each in waiting:
            each.cancel()
        release()

    asyncio.run(main())


def test_a_request_aborted_just_before_a_death_is_a_suspect_of_that_death_alone() -> None:
    async def main() -> None:
        clock = Clock()
        suspects = Suspects(clock)
        suspects.note_aborted(OTHERS[0])
        clock.now_s += 31
        suspects.note_aborted(POISON)
        clock.now_s += 29
        assert suspects.num_aborted == 1
        suspects.note_death([])
        assert (len(suspects), suspects.num_aborted) == (1, 0)
        suspects.note_death([OTHERS[1]])
        assert await admitted(suspects, POISON)  # two points, none for the second death
        suspects.note_aborted(POISON)
        suspects.note_death([OTHERS[2]])
        with pytest.raises(InvalidRequestError):
            await suspects.admit(POISON)

    asyncio.run(main())


def test_aborted_suspects_are_few() -> None:
    suspects = Suspects(Clock())
    for number in range(5000):
        suspects.note_aborted(replace(POISON, prompt_token_ids=(number,)))
    assert suspects.num_aborted == 4096
    suspects.forget_aborted()
    assert suspects.num_aborted == 0


def test_all_is_forgotten_in_the_end() -> None:
    async def main() -> None:
        clock = Clock()
        suspects = Suspects(clock)
        for _ in range(2):
            suspects.note_death([POISON])
        with pytest.raises(InvalidRequestError):
            await suspects.admit(POISON)
        clock.now_s += 601
        assert await admitted(suspects, POISON)
        suspects.note_death([replace(POISON, prompt_token_ids=(n,)) for n in range(5000)])
        assert len(suspects) == 4096

    asyncio.run(main())

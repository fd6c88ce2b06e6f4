"""`AsyncLLM` gives what `LLM` gives, to tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar import LLM, AsyncLLM, SamplingParams
from realizar.errors import EngineDeadError, EngineUnavailableError, HubError, InvalidRequestError
from reference_tensors import looked_up
from tiny_model import write_tiny_model
from waits import HANG_S

OPTIONS: dict[str, Any] = {"threads": 1, "context_length": 256, "max_running": 3, "max_step_tokens": 7}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Once", "a cat sat", "x", "to be or not"]
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as model:
        yield model


def run(path: Path, test: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(HANG_S), AsyncLLM(path, **OPTIONS) as model:
            await test(model)
            assert model._running is not None
            while (stats := await model._running.engine.stats()).num_running or stats.num_waiting:
                pass
            assert await model._running.engine.audit() is None

    asyncio.run(main())


def test_texts_chats_scores_and_vectors_are_those_of_the_twin(path: Path, llm: LLM) -> None:
    question = [{"role": "user", "content": "Hello!"}]
    wanted = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY)]

    async def test(model: AsyncLLM) -> None:
        outputs = await model.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].text for output in outputs] == wanted
        assert [output.prompt for output in outputs] == PROMPTS
        chat, twin = await model.chat(question, GREEDY), llm.chat(question, GREEDY)
        assert (chat[0].outputs, chat[0].prompt_token_ids) == (twin[0].outputs, twin[0].prompt_token_ids)
        np.testing.assert_array_equal(await model.embed(PROMPTS, pooling="mean"), llm.embed(PROMPTS, pooling="mean"))
        ids = llm.tokenizer.encode(PROMPTS[0])
        (given,) = await model.generate({"prompt_embeds": looked_up(llm.spec, llm.checkpoint, ids)}, GREEDY)
        assert given.outputs[0].text == wanted[0]
        assert await model.score("Once upon", 2) == llm.score("Once upon", 2)
        assert model.default_sampling == llm.default_sampling
        assert (model.max_request_tokens, model.tokenizer.eos_ids) == (256, llm.tokenizer.eos_ids)

    run(path, test)


def test_streams_are_the_whole_in_deltas(path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
    wanted = llm.generate(PROMPTS[0], params)[0].outputs[0]

    async def test(model: AsyncLLM) -> None:
        async with await model.stream(PROMPTS[0], params) as stream:
            text = "".join([delta.text async for delta in stream])
            output = (await stream.result()).outputs[0]
        assert (text, output.text) == (wanted.text, wanted.text)
        assert [token.token_id for token in output.logprobs or ()] == list(wanted.token_ids)
        async with await model.chat_stream([{"role": "user", "content": "Hello!"}], GREEDY) as stream:
            assert len((await stream.result()).outputs[0].token_ids) == 6

    run(path, test)


def test_more_prompts_than_the_queue_holds(path: Path, llm: LLM) -> None:
    """Two tasks at once, each with more prompts than run and wait; parameters of each, progress of all."""
    prompts = [f"number {number}" for number in range(30)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 3, ignore_eos=True) for number in range(30)]
    wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    calls: list[tuple[int, int]] = []

    async def test(model: AsyncLLM) -> None:
        both = await asyncio.gather(
            model.generate(prompts, params, progress=lambda done, total: calls.append((done, total))),
            model.generate(prompts, params, use_tqdm=False),
        )
        for outputs in both:
            assert [output.outputs[0].token_ids for output in outputs] == wanted

    run(path, test)
    assert calls[-1] == (30, 30)


def test_what_is_left_or_cancelled_ends(path: Path) -> None:
    async def test(model: AsyncLLM) -> None:
        async with await model.stream("Once", LONG) as stream:
            async for _ in stream:
                break
        task = asyncio.create_task(model.generate(["Once"] * 40, LONG))
        async with await model.stream("Once", GREEDY) as stream:
            await stream.result()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(path, test)


def test_one_bad_prompt_fails_its_call_alone(path: Path, llm: LLM) -> None:
    async def test(model: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            await model.generate(["Once", []], LONG)
        with pytest.raises(InvalidRequestError, match="2 sampling parameters were given for 1 prompts"):
            await model.generate("x", [GREEDY, GREEDY])
        with pytest.raises(InvalidRequestError, match="not made for embeddings"):
            await model.embed("x")
        assert len(await model.generate("x", GREEDY)) == 1

    run(path, test)


def test_states_are_named(path: Path) -> None:
    async def main() -> None:
        model = AsyncLLM(path, **OPTIONS)
        assert repr(model) == f"AsyncLLM({str(path)!r}, not loaded)"
        with pytest.raises(EngineUnavailableError, match="await start"):
            await model.generate("x")
        async with model:
            assert repr(model) == f"AsyncLLM({str(path)!r}, device='cpu', context_length=256)"
            with pytest.raises(EngineUnavailableError, match="started before"):
                await model.start()
            stream = await model.stream("Once", LONG)
        with pytest.raises(EngineDeadError):
            await stream.result()
        with pytest.raises(EngineDeadError):
            await model.generate("x")
        assert repr(model) == f"AsyncLLM({str(path)!r}, closed)"

    asyncio.run(main())


def test_a_model_that_can_not_be_loaded_says_why(path: Path) -> None:
    async def main() -> None:
        with pytest.raises(HubError, match="does not exist"):
            await AsyncLLM("nonesuch.gguf").start()
        with pytest.raises(InvalidRequestError, match="context_length"):
            await AsyncLLM(path, context_length=1 << 20).start()

    asyncio.run(main())
    with pytest.raises(InvalidRequestError, match="tensor_parallel_size=2 is not supported"):
        AsyncLLM(path, tensor_parallel_size=2)

"""A conversation that no dialect's record made: planned, run and put together; errors name the dialect's own fields."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, cast

import pytest

from realizar.engine.frontend.outputs import ChoiceDelta
from realizar.errors import ContextLengthError, InvalidRequestError
from realizar.request import Client
from realizar.sampling_params import StructuredOutput
from realizar.server.api import Api, make_api
from realizar.server.errors import ApiError
from realizar.server.generation.answer import AnswerDelta, AnswerParts
from realizar.server.generation.chat_plan import plan_chat
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.conversation import Conversation
from realizar.server.generation.sampling import SamplingWishes
from realizar.server.generation.tools import ToolPlan, check_functions
from realizar.server.http.request_memory import RequestLease
from realizar.server.http.work import Stop
from realizar.server.settings import ServerSettings
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta, ToolCallDelta
from server.scripted_engine import ScriptedEngine, scripted_model

HI = {"role": "user", "content": "Hi"}
NAMES = {"messages": "turns", "tools": "functions", "structured": "format", "max_tokens": "length"}


class NoLease:
    """A lease without bounds."""

    client = Client("someone")

    def begin_logprobs(self) -> None: ...


def api_of(engine: ScriptedEngine) -> Api:
    return make_api(cast("Any", engine), scripted_model(), ServerSettings())


def conversation(plain: dict[str, Any] | None = None, **fields: Any) -> Conversation:
    wishes = SamplingWishes(plain=plain or {}, **fields)
    return Conversation(messages=[HI], tools=ToolPlan(), wishes=wishes, names=NAMES)


def test_a_conversation_is_planned_run_and_whole() -> None:
    engine = ScriptedEngine(num_cached=3)
    api = api_of(engine)
    plan = plan_chat(api, conversation({"temperature": 0.25, "n": 2, "max_tokens": 7}), Stop())
    run = ChatRun(api, plan, "id", cast("RequestLease", NoLease()))
    choices = [AnswerParts(), AnswerParts()]

    async def main() -> None:
        async with aclosing(run.deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].take_in(delta)

    asyncio.run(main())
    assert [choice.text("content") for choice in choices] == ["Hello", "Hello"]
    assert (run.num_completion_tokens, run.num_cached_tokens) == (4, 3)
    ((prompt, sampling, options),) = engine.asked
    assert prompt == plan.token_ids
    assert (sampling.temperature, sampling.max_tokens, options["client"]) == (0.25, 7, NoLease.client)


def test_errors_name_the_fields_of_the_dialect() -> None:
    api = api_of(ScriptedEngine())
    with pytest.raises(InvalidRequestError, match=r"^length must be") as caught:
        plan_chat(api, conversation({"max_tokens": -3}), Stop())
    assert caught.value.param == "length"
    long = Conversation(
        messages=[{**HI, "content": "x" * 300_000}], tools=ToolPlan(), wishes=SamplingWishes(plain={}), names=NAMES
    )
    with pytest.raises(ContextLengthError, match=r"^turns ") as too_long:
        plan_chat(api, long, Stop())
    assert too_long.value.param == "turns"


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (InvalidRequestError("the grammar is bad", "structured"), "format"),
        (ContextLengthError("prompt and output are too long", "max_tokens"), "turns"),
        (ApiError(400, "structured is wrong", param="structured"), "format"),
        (InvalidRequestError("other is bad", "other"), "other"),
    ],
)
def test_errors_of_the_engine_name_them_too(error: Exception, param: str) -> None:
    engine = ScriptedEngine(refusal=error)
    api = api_of(engine)
    plan = plan_chat(api, conversation(structured=StructuredOutput("regex", "a")), Stop())
    run = ChatRun(api, plan, "id", cast("RequestLease", NoLease()))

    async def main() -> None:
        async with aclosing(run.deltas()) as deltas:
            await anext(deltas)

    with pytest.raises(type(error)) as caught:
        asyncio.run(main())
    assert cast("Any", caught.value).param == param


def test_calls_are_put_together_by_their_index() -> None:
    choice = AnswerParts()
    parts: list[Any] = [
        ReasoningDelta("why"),
        ContentDelta("a"),
        ToolCallDelta(0, "x", "f", '{"a":'),
        ToolCallDelta(0, None, None, "1}"),
        ToolCallDelta(1, "y", "g", "{}"),
    ]
    for part in parts:
        choice.take_in(AnswerDelta(0, [part], ChoiceDelta("id", 0, "", ()), None))
    choice.take_in(AnswerDelta(0, [], ChoiceDelta("id", 0, "", (), stop_reason="z"), "tool_calls"))
    assert [(part.call, part.text) for part in choice.of("call")] == [(parts[2], '{"a":1}'), (parts[4], "{}")]
    assert [part.kind for part in choice.parts] == ["reasoning", "content", "call", "call"]
    assert [choice.text(kind) for kind in ("content", "reasoning")] == ["a", "why"]
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", "z")


@pytest.mark.parametrize(
    ("functions", "param"),
    [
        ([{"name": "a b"}], "t0.f"),
        ([{"name": "a"}, {"name": "a"}], "t1.f"),
        ([{"name": "a", "parameters": {"type": "array"}}], "t0.s.type"),
    ],
)
def test_tools_are_refused_by_their_path(functions: list[dict[str, Any]], param: str) -> None:
    tools = [{"type": "function", "function": function} for function in functions]
    with pytest.raises(ApiError) as caught:
        check_functions(tools, [f"t{place}" for place in range(len(tools))], ".f", ".s")
    assert caught.value.param == param

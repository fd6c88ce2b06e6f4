"""Kept responses: the official client goes on from them, lists, reads and deletes them, and the store has bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from realizar.errors import InvalidRequestError
from realizar.server.app import create_app
from realizar.server.errors import ApiError
from realizar.server.responses.store import ResponseStore, StoredResponse
from realizar.server.settings import ServerSettings
from server.responses.test_response_answers import TEMPLATE
from server.scripted_engine import ScriptedEngine, scripted_model

KEEPING = ServerSettings(max_stored_responses=3)
CALL = '</think><tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "a", "parameters": {"type": "object"}}
ITEM: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)
Talk = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def talk(engine: ScriptedEngine, settings: ServerSettings, *parts: Talk, keys: tuple[str, ...] = ("k",)) -> None:
    """Let the official client talk to one server, each part with its own key."""
    app = create_app(cast("Any", engine), scripted_model(TEMPLATE), settings)

    async def main() -> None:
        for place, part in enumerate(parts):
            transport = httpx.ASGITransport(app)
            async with openai.AsyncOpenAI(
                base_url="http://server/v1",
                api_key=keys[place % len(keys)],
                max_retries=0,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client:
                await part(client)

    asyncio.run(main())


def prompts(engine: ScriptedEngine) -> list[str]:
    return [bytes(ids).decode() for ids, _, _ in engine.asked]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_goes_on_from_kept_responses(streamed: bool) -> None:
    engine = ScriptedEngine(deltas=("Hm.", CALL))

    async def create(client: openai.AsyncOpenAI, **fields: Any) -> Response:
        if not streamed:
            return cast("Response", await client.responses.create(model="scripted", **fields))
        async with client.responses.stream(model="scripted", **fields) as stream:
            return cast("Response", await stream.get_final_response())

    async def main(client: openai.AsyncOpenAI) -> None:
        first = await create(client, input="Go", instructions="Be brief.", tools=[TOOL])
        found = await client.responses.retrieve(first.id)
        assert found.to_dict()["output"] == first.to_dict(exclude_unset=True)["output"] or streamed
        assert found.to_dict()["store"] is True
        assert found.status == "completed"
        call = cast("Any", first.output[-1])
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
        engine.deltas = ("</think>", "Seven.")
        second = await create(client, input=[output], previous_response_id=first.id, tools=[TOOL])
        assert (second.previous_response_id, second.output_text) == (first.id, "Seven.")
        await create(client, input="So?", previous_response_id=second.id)
        listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.type for item in listed] == ["message", "reasoning", "function_call", "function_call_output"]
        assert all(ITEM.validate_python(item.to_dict()) for item in listed)
        newest = await client.responses.input_items.list(second.id)
        assert [item.id for item in newest.data] == [item.id for item in reversed(listed)]
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(second.id)
        await client.responses.delete(first.id)
        for gone in (first.id, "resp_x"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
            with pytest.raises(openai.BadRequestError) as refused:
                await create(client, input="So?", previous_response_id=gone)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.BadRequestError, match=first.id):
            await create(client, input="So?", previous_response_id=second.id)

    talk(engine, KEEPING, main)
    first, second, third = (prompt.removesuffix("<think>").rpartition("<tool_call>")[2] for prompt in prompts(engine))
    assert first == "system:Be brief.|user:Go|"
    assert second.startswith("user:Go|assistant:[Hm.][{")  # instructions are not carried over
    assert second.endswith("|tool:7|")
    assert third == second + "assistant:Seven.|user:So?|"


def test_items_are_referred_to_by_their_ids() -> None:
    engine = ScriptedEngine(deltas=("Hm.", CALL))
    refusals: list[tuple[Any, str]] = [
        ({"type": "item_reference", "id": "msg_x"}, "input[0].id"),
        ({"type": "item_reference"}, "input[0].id"),
        ({"type": "item_reference", "id": "msg_x", "role": "user"}, "input[0].role"),
    ]

    async def main(client: openai.AsyncOpenAI) -> None:
        first = await client.responses.create(model="scripted", input="Go", tools=cast("Any", [TOOL]))
        (question,) = (await client.responses.input_items.list(first.id)).data
        thought, call = first.output
        engine.deltas = ("</think>", "Seven.")
        items: list[Any] = [
            {"type": "item_reference", "id": question.id},
            {"type": "item_reference", "id": thought.id},
            {"id": call.id},
            {"type": "function_call_output", "call_id": cast("Any", call).call_id, "output": "7"},
        ]
        second = await client.responses.create(model="scripted", input=items, tools=cast("Any", [TOOL]))
        counted = await client.responses.input_tokens.count(model="scripted", input=items, tools=cast("Any", [TOOL]))
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens
        listed = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed.data] == ["message", "reasoning", "function_call", "function_call_output"]
        await client.responses.delete(first.id)
        again: Any = [{"type": "item_reference", "id": question.id}]  # it is an item of the second response too
        await client.responses.create(model="scripted", input=again)
        for item, param in refusals:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="scripted", input=[item])
            assert refused.value.param == param

    async def other(client: openai.AsyncOpenAI) -> None:
        known = [{"type": "item_reference", "id": ids[0]}]
        with pytest.raises(openai.BadRequestError, match="there is no item"):
            await client.responses.create(model="scripted", input=cast("Any", known))

    ids: list[str] = []

    async def one(client: openai.AsyncOpenAI) -> None:
        ids.append((await client.responses.create(model="scripted", input="Go")).output[0].id or "")

    talk(engine, KEEPING, main)
    asked = [prompt.removesuffix("<think>").rpartition("<tool_call>")[2] for prompt in prompts(engine)]
    assert asked[1].startswith("user:Go|assistant:[Hm.][{")
    assert asked[1].endswith("|tool:7|")
    assert asked[2] == "user:Go|"
    settings = ServerSettings(api_keys=("k", "l"), max_stored_responses=3)
    talk(ScriptedEngine(), settings, one, other, keys=("k", "l"))


def test_an_item_is_referred_to_once() -> None:
    engine = ScriptedEngine()

    async def main(client: openai.AsyncOpenAI) -> None:
        long: Any = [{"role": "user", "id": "long", "content": "long " * 100}]
        await client.responses.create(model="scripted", input=long)
        reference: Any = {"type": "item_reference", "id": "long"}
        for ask in (client.responses.create, client.responses.input_tokens.count):
            with pytest.raises(openai.BadRequestError, match="'long' is there already") as refused:
                await ask(model="scripted", input=[reference, {"role": "user", "content": "Go"}, {"id": "long"}])
            assert (refused.value.param, refused.value.code) == ("input[2].id", "duplicate_item")

    talk(engine, KEEPING, main)
    assert len(prompts(engine)) == 1


def test_without_a_store_nothing_is_kept_and_nothing_can_be_gone_on_from() -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        for wanted in ({}, {"store": True}, {"store": False}):
            made = await client.responses.create(model="scripted", input="Go", **cast("Any", wanted))
            assert made.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="--stored-responses") as refused:
            await client.responses.create(model="scripted", input="Go", previous_response_id=made.id)
        assert refused.value.param == "previous_response_id"
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="--stored-responses"):
                await ask(made.id)

    talk(ScriptedEngine(), ServerSettings(), main)


def test_what_a_client_keeps_is_its_own_and_only_if_it_wants() -> None:
    ids: list[str] = []

    async def one(client: openai.AsyncOpenAI) -> None:
        made = await client.responses.create(model="scripted", input="Go")
        unkept = await client.responses.create(model="scripted", input="Go", store=False)
        ids.extend((made.id, unkept.id))
        await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await client.responses.retrieve(made.id, stream=True)

    async def other(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[0])
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(ids[0])
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(ids[0])
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="scripted", input="Go", previous_response_id=ids[0])

    settings = ServerSettings(api_keys=("k", "l"), max_stored_responses=3)
    talk(ScriptedEngine(), settings, one, other, keys=("k", "l"))


def stored(name: str, size: int = 100, previous: str | None = None, client: str = "") -> StoredResponse:
    return StoredResponse(name, "", client, b"x" * size, b"[]", previous)


def test_the_store_stays_in_its_bounds() -> None:
    store = ResponseStore(3, 10_000)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.keep(stored(name, previous=previous))
    assert [each.id for each in store.chain("b", "")] == ["a", "b"]
    store.keep(stored("d"))  # c was used least recently, b after its first
    with pytest.raises(ApiError):
        store.find("c", "")
    store.keep(stored("e", 8_000))
    assert store.find("e", "").num_bytes < 10_000
    with pytest.raises(ApiError):
        store.chain("b", "")
    store.keep(stored("f", 10_000))  # larger than all of it
    with pytest.raises(ApiError):
        store.find("f", "")
    store.delete("e", "")
    store.keep(stored("g", 8_000))
    assert store.find("g", "")


def kept(store: ResponseStore, client: str, numbers: range) -> list[str]:
    """Those of a client's responses that are there."""
    found = []
    for name in (f"{client}{number}" for number in numbers):
        with suppress(ApiError):
            found.append(store.find(name, "").id)
    return found


@pytest.mark.parametrize(("store", "size"), [(ResponseStore(10, 1 << 20), 100), (ResponseStore(99, 20_000), 974)])
def test_one_client_does_not_push_the_responses_of_others_out(store: ResponseStore, size: int) -> None:
    """Whether their number is bounded or their memory. A lone client may have all."""
    assert stored("x", size).num_bytes in (1126, 2000)
    for number in range(20):
        store.keep(stored(f"greedy{number}", size, client="greedy"))
    assert kept(store, "greedy", range(20)) == [f"greedy{number}" for number in range(10, 20)]
    for number in range(2):
        store.keep(stored(f"other{number}", size, client="other"))
    for number in range(20, 40):
        store.keep(stored(f"greedy{number}", size, client="greedy"))
    assert kept(store, "other", range(2)) == ["other0", "other1"]
    assert kept(store, "greedy", range(40)) == [f"greedy{number}" for number in range(32, 40)]
    for number in range(2, 10):
        store.keep(stored(f"other{number}", size, client="other"))
    assert kept(store, "other", range(10)) == [f"other{number}" for number in range(5, 10)]
    assert kept(store, "greedy", range(40)) == [f"greedy{number}" for number in range(35, 40)]


def test_without_keys_an_address_has_its_share() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings(max_stored_responses=4))
    names: dict[str, list[str]] = {}

    async def main() -> None:
        for address in ("192.0.2.1", *["192.0.2.2"] * 9):
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                made = await client.post("/v1/responses", json={"input": "Go"})
                names.setdefault(address, []).append(made.json()["id"])
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            (first,) = names["192.0.2.1"]
            assert (await client.get(f"/v1/responses/{first}")).status_code == 200

    asyncio.run(main())


def test_kept_responses_need_one_process() -> None:
    with pytest.raises(InvalidRequestError, match="2 API processes"):
        KEEPING.share(0, 2)
    assert ServerSettings().share(0, 2)
    with pytest.raises(InvalidRequestError, match="at least 0"):
        ServerSettings(max_stored_responses=-1)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1e9", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
        ("x=1", "x"),
        ("before=x", "before"),
        ("include=x", "include[0]"),
    ],
)
def test_odd_listings_are_refused(query: str, param: str) -> None:
    async def main(client: openai.AsyncOpenAI) -> None:
        made = await client.responses.create(model="scripted", input="Go")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.get(f"/responses/{made.id}/input_items?{query}", cast_to=object)
        assert refused.value.param == param

    talk(ScriptedEngine(), KEEPING, main)

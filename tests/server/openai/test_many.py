"""Many at once, and the list of models, through the official client."""

from __future__ import annotations

import asyncio

import openai

from server_thread import RunningServer

MODEL = "org/smollm2"
SUBJECTS = ["fox", "sea", "moon", "king", "tree", "clock", "river", "bread"]


def ask(number: int) -> dict[str, object]:
    content = f"Write about the {SUBJECTS[number % len(SUBJECTS)]}, part {number}."
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.8 if number % 2 else 0,
        "seed": number,
        "max_tokens": 12 + number % 9,
    }


def test_streams_at_once_are_what_each_is_alone(server: RunningServer, client: openai.OpenAI) -> None:
    """Twice as many as run at once."""
    count = 32

    async def one(many: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        async for chunk in await many.chat.completions.create(**ask(number), stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def main() -> list[str]:
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        async with openai.AsyncOpenAI(**options) as many:
            return await asyncio.gather(*(one(many, number) for number in range(count)))

    together = asyncio.run(main())
    for number in range(0, count, 4):
        alone = client.chat.completions.create(**ask(number)).choices[0].message.content
        assert together[number] == alone
        odd = client.chat.completions.create(**ask(number + 1)).choices[0].message.content
        assert together[number + 1] == odd


def test_models_by_name(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL, "other"]
    assert client.models.retrieve(MODEL) == listed[0]
    assert listed[0].model_extra["max_model_len"] == 1024

"""`POST /api/chat`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import compute
from realizar.server.generation.chat_plan import plan_chat
from realizar.server.http.body import read_record
from realizar.server.models.needs import chats
from realizar.server.ollama.answers import answer, loaded
from realizar.server.ollama.conversation import read_chat, shows_thinking
from realizar.server.ollama.names import model_for, unloads
from realizar.server.ollama.parts import Part
from realizar.server.ollama.records import ChatRequest
from realizar.server.ollama.times import Clock


class ChatForm:
    """The form of `/api/chat`: a message."""

    def show(self, part: Part) -> dict[str, Any]:
        """See `Form`."""
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.thinking:
            message["thinking"] = part.thinking
        if part.calls:
            message["tool_calls"] = part.calls
        return {"message": message}

    def last(self, token_ids: list[int]) -> dict[str, Any]:
        """See `Form`."""
        return {}


async def chat(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of lines."""
    clock = Clock()
    record = await read_record(request, ChatRequest)
    if not record.messages:
        return loaded(ChatForm(), record.model, unload=await unloads(request, record.model, record.keep_alive))
    api = await model_for(request, record.model, record.keep_alive, clock, chats())
    plan = await compute(request, lambda stop: plan_chat(api, read_chat(api, record), stop))
    return await answer(
        request,
        api,
        plan,
        ChatForm(),
        clock,
        record.model,
        stream=record.stream is not False,
        with_thinking=shows_thinking(record),
    )

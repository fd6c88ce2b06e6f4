"""Every field that the official client knows is a field here, and every one that is refused says so by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import (
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.shared_params import FunctionDefinition

from realizar.server.errors import ApiError
from realizar.server.openapi import describe
from realizar.server.protocol.chat import ChatCompletionRequest
from realizar.server.protocol.chat import FunctionDefinition as OurFunction
from realizar.server.protocol.completion import CompletionRequest
from realizar.server.protocol.embedding import EmbeddingRequest
from realizar.server.protocol.messages import check_messages
from realizar.server.protocol.neutral import NEUTRAL, check_neutral
from realizar.server.protocol.sampling import StreamOptions

RECORDS: list[tuple[Any, type[msgspec.Struct]]] = [
    (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (ChatCompletionStreamOptionsParam, StreamOptions),
    (FunctionDefinition, OurFunction),
]


@pytest.mark.parametrize(("theirs", "ours"), RECORDS, ids=[ours.__name__ for _, ours in RECORDS])
def test_every_field_is_known(theirs: Any, ours: type[msgspec.Struct]) -> None:
    assert set(theirs.__annotations__) <= set(ours.__struct_fields__)


def test_every_field_of_messages_is_known() -> None:
    for kind in ChatCompletionMessageParam.__args__:
        hints = get_type_hints(kind)
        role = hints["role"].__args__[0]
        if role == "function":
            continue
        message: dict[str, Any] = {name: None for name in hints if name not in ("role", "content")}
        needed = {"tool_call_id": "1"} if role == "tool" else {}
        (checked,) = check_messages([{**message, **needed, "role": role, "content": "x"}])
        assert checked == {"role": role, "content": "x", **needed}


def test_fields_without_a_type_are_checked() -> None:
    """A field that takes anything is either refused or neutral, never passed over."""
    for record in (ChatCompletionRequest, CompletionRequest):
        loose = {field.name for field in msgspec.structs.fields(record) if field.type is Any}
        assert loose <= set(NEUTRAL)
    chat = {"model": "x", "messages": [{"role": "user", "content": "x"}]}
    for name in NEUTRAL:
        if name not in ChatCompletionRequest.__struct_fields__:
            continue
        check_neutral(msgspec.convert({**chat, name: None}, ChatCompletionRequest))
        with pytest.raises(ApiError) as caught:
            check_neutral(msgspec.convert({**chat, name: {"some": "thing"}}, ChatCompletionRequest))
        assert caught.value.param == name


def test_the_description_has_every_endpoint_and_field() -> None:
    described = describe()
    schemas = described["components"]["schemas"]
    assert set(schemas["ChatCompletionRequest"]["properties"]) == set(ChatCompletionRequest.__struct_fields__)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"} < set(
        described["paths"]
    )

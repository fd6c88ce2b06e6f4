"""Every field that the official client knows is a field here, and every one that is refused says so by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionAllowedToolsParam,
    ChatCompletionAssistantMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.chat.chat_completion_content_part_image_param import ChatCompletionContentPartImageParam, ImageURL
from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam
from openai.types.chat.chat_completion_content_part_refusal_param import ChatCompletionContentPartRefusalParam
from openai.types.chat.chat_completion_content_part_text_param import ChatCompletionContentPartTextParam
from openai.types.chat.chat_completion_message_custom_tool_call_param import ChatCompletionMessageCustomToolCallParam
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.chat.chat_completion_message_tool_call_union_param import ChatCompletionMessageToolCallUnionParam
from openai.types.chat.chat_completion_tool_choice_option_param import ChatCompletionToolChoiceOptionParam
from openai.types.shared_params import (
    FunctionDefinition,
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from openai.types.shared_params.response_format_json_schema import JSONSchema

from realizar import server as server_package
from realizar.server.app import COMMON_ROUTES, DIALECTS, describe
from realizar.server.errors import ApiError
from realizar.server.generation.objects import check_neutral
from realizar.server.generation.sampling import PLAIN_FIELDS
from realizar.server.openai.conversation import check_messages, plan_tools
from realizar.server.openai.fields import CONSTRAINTS
from realizar.server.openai.records import (
    CHAT_NEUTRAL,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
    Tool,
)
from realizar.server.openai.records import NEUTRAL as SHARED_NEUTRAL
from realizar.server.openai.records import FunctionDefinition as OurFunction

NEUTRAL = {**SHARED_NEUTRAL, **CHAT_NEUTRAL}
RECORDS: list[tuple[Any, type[msgspec.Struct]]] = [
    (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (ChatCompletionStreamOptionsParam, StreamOptions),
    (FunctionDefinition, OurFunction),
    (ChatCompletionFunctionToolParam, Tool),
    (ResponseFormatText, ResponseFormat),
    (ResponseFormatJSONObject, ResponseFormat),
    (ResponseFormatJSONSchema, ResponseFormat),
    (JSONSchema, JsonSchemaFormat),
]
STREAMING = (
    chat_create_params.CompletionCreateParamsStreaming,
    completion_create_params.CompletionCreateParamsStreaming,
)
# They change nothing of an answer, here or there.
WITHOUT_EFFECT = {
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("cache_control", "safety_identifier", "user"),
}
USER = {"role": "user", "content": "x"}


def names_of(kind: Any) -> set[str]:
    """The fields of one of the client's types."""
    return set(get_type_hints(kind))


@pytest.mark.parametrize(("theirs", "ours"), RECORDS, ids=[ours.__name__ for _, ours in RECORDS])
def test_every_field_is_known(theirs: Any, ours: type[msgspec.Struct]) -> None:
    assert names_of(theirs)
    assert names_of(theirs) <= set(ours.__struct_fields__)


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


def test_every_field_of_streams_is_known() -> None:
    for theirs, ours in zip(STREAMING, (ChatCompletionRequest, CompletionRequest), strict=True):
        assert "stream" in names_of(theirs)
        assert names_of(theirs) <= set(ours.__struct_fields__)


def test_every_field_of_calls_and_parts_is_known() -> None:
    assert names_of(ChatCompletionMessageFunctionToolCallParam) == {"id", "function", "type"}
    assert names_of(Function) == {"name", "arguments"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    check_messages([{"role": "assistant", "tool_calls": [call]}])
    part = {key: {} for key in names_of(ChatCompletionContentPartTextParam)} | {"type": "text", "text": "x"}
    image = {key: {} for key in names_of(ChatCompletionContentPartImageParam)} | {"type": "image_url"}
    given = dict.fromkeys(names_of(ImageURL), "auto")
    check_messages([{"role": "user", "content": [part, image | {"image_url": given}]}])


def test_every_other_kind_of_parts_and_calls_is_refused_by_its_type() -> None:
    parts = [*ChatCompletionContentPartParam.__args__, ChatCompletionContentPartRefusalParam]
    for kind in parts:
        if kind in (ChatCompletionContentPartTextParam, ChatCompletionContentPartImageParam):
            continue
        part = {name: {} for name in names_of(kind)} | {"type": get_type_hints(kind)["type"].__args__[0]}
        role = "assistant" if kind is ChatCompletionContentPartRefusalParam else "user"
        with pytest.raises(ApiError) as caught:
            check_messages([{"role": role, "content": [part]}])
        assert caught.value.param == "messages[0].content[0].type"
    assert len(ChatCompletionMessageToolCallUnionParam.__args__) == 2
    call = {name: {} for name in names_of(ChatCompletionMessageCustomToolCallParam)} | {"type": "custom"}
    with pytest.raises(ApiError) as caught:
        check_messages([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[0].tool_calls[0].type"
    for name in names_of(ChatCompletionAssistantMessageParam) - {"role", "content", "name", "tool_calls"}:
        with pytest.raises(ApiError) as caught:
            check_messages([{"role": "assistant", "content": "x", name: {"x": 1}}])
        assert caught.value.param == f"messages[0].{name}"


def test_every_kind_of_tool_and_choice_is_known() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    kinds = [kind for kind in ChatCompletionToolChoiceOptionParam.__args__ if isinstance(kind, type)]
    assert [get_type_hints(kind)["type"].__args__[0] for kind in kinds] == ["allowed_tools", "function", "custom"]
    assert names_of(ChatCompletionNamedToolChoiceParam) == {"type", "function"}
    assert names_of(ChatCompletionAllowedToolChoiceParam) == {"type", "allowed_tools"}
    assert names_of(ChatCompletionAllowedToolsParam) == {"mode", "tools"}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    for choice in ("none", "auto", "required", tools[0], allowed):
        body = {"messages": [USER], "tools": tools, "tool_choice": choice}
        plan_tools(msgspec.convert(body, ChatCompletionRequest))
    custom = {"type": "custom", "custom": {"name": "f"}}
    for fields, param in (({"tool_choice": custom}, "tool_choice.type"), ({"tools": [custom]}, "tools[0].type")):
        record = msgspec.convert({"messages": [USER], "tools": tools, **fields}, ChatCompletionRequest)
        with pytest.raises(ApiError) as caught:
            plan_tools(record)
        assert caught.value.param == param
    assert len(ChatCompletionToolUnionParam.__args__) == 2


def test_no_field_is_passed_over() -> None:
    """Each is read somewhere in the server, is checked as neutral, or is named above."""
    server = Path(server_package.__file__).parent
    read = {*PLAIN_FIELDS, *CONSTRAINTS, *(f"guided_{name}" for name in CONSTRAINTS)}
    for file in server.rglob("*.py"):
        if file.parent.name != "records":
            tree = ast.parse(file.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    records = [ours for _, ours in RECORDS]
    for record in (*records, TokenizeRequest, DetokenizeRequest, StructuredOutputs):
        for name in record.__struct_fields__:
            if record in (OurFunction, JsonSchemaFormat) or name == "include_obfuscation":
                continue  # passed on whole; padding that is never sent
            assert (name in read) + (name in NEUTRAL) + (name in WITHOUT_EFFECT) > 0, (record.__name__, name)


def test_fields_without_a_type_are_checked() -> None:
    """A field that takes anything is either refused or neutral, never passed over."""
    for record in (ChatCompletionRequest, CompletionRequest):
        loose = {field.name for field in msgspec.structs.fields(record) if field.type is Any}
        assert loose <= set(NEUTRAL)
    chat = {"model": "x", "messages": [{"role": "user", "content": "x"}]}
    for name in NEUTRAL:
        if name not in ChatCompletionRequest.__struct_fields__:
            continue
        check_neutral(msgspec.convert({**chat, name: None}, ChatCompletionRequest), NEUTRAL)
        with pytest.raises(ApiError) as caught:
            check_neutral(msgspec.convert({**chat, name: {"some": "thing"}}, ChatCompletionRequest), NEUTRAL)
        assert caught.value.param == name


def test_the_description_has_every_endpoint_and_field() -> None:
    described = describe(DIALECTS, COMMON_ROUTES)
    schemas = described["components"]["schemas"]
    assert set(schemas["ChatCompletionRequest"]["properties"]) == set(ChatCompletionRequest.__struct_fields__)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"} < set(
        described["paths"]
    )

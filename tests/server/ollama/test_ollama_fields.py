"""Every field of the official client's types is known: honoured, without effect for a reason, or refused by name."""

from __future__ import annotations

from typing import Any

from ollama import _types as types

from realizar.server.ollama.conversation import _KNOWN
from realizar.server.ollama.conversation import _OF_FUNCTION as _OF_TOOL
from realizar.server.ollama.messages import _FIELDS, _OF_CALL, _OF_FUNCTION
from realizar.server.ollama.records import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Options,
    PullRequest,
    ShowRequest,
)


def fields_of(record: Any) -> set[str]:
    return set(record.__struct_fields__)


def names_of(kind: Any) -> set[str]:
    return set(kind.model_fields)


def test_requests() -> None:
    assert names_of(types.Options) <= fields_of(Options)
    assert names_of(types.ChatRequest) <= fields_of(ChatRequest)
    images = {"width", "height", "steps"}  # of models that make images; refused as unknown ones, by name
    assert names_of(types.GenerateRequest) - fields_of(GenerateRequest) == images
    assert names_of(types.ShowRequest) <= fields_of(ShowRequest)
    for ours, theirs in (
        (EmbedRequest, types.EmbedRequest),
        (EmbeddingsRequest, types.EmbeddingsRequest),
        (PullRequest, types.PullRequest),
    ):
        assert names_of(theirs) <= fields_of(ours)
    assert fields_of(ChatRequest) - names_of(types.ChatRequest) == {"template", "truncate", "shift"}


def test_messages_and_tools() -> None:
    known = {name for names in _FIELDS.values() for name in names}
    assert names_of(types.Message) <= known
    assert names_of(types.Message.ToolCall) <= set(_OF_CALL)
    assert names_of(types.Message.ToolCall.Function) <= set(_OF_FUNCTION)
    assert names_of(types.Tool) <= set(_KNOWN)
    assert names_of(types.Tool.Function) <= set(_OF_TOOL)

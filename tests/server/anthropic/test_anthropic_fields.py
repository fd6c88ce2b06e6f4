"""Every field of the official client's types is known: honoured, without effect for a reason, or refused by name."""

from __future__ import annotations

from typing import Any

from anthropic import types
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params

from realizar.server.anthropic.conversation import _FIELDS, _KNOWN
from realizar.server.anthropic.records import (
    CountTokensRequest,
    MessagesRequest,
    Metadata,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
)

BETA_REFUSED = {"billing_policy", "fallback_credit_token", "fallbacks"}
"""Fields of the beta API that are refused as unknown ones, by name. `betas` is a header."""


def fields_of(record: Any) -> set[str]:
    return set(record.__struct_fields__)


def names_of(kind: Any) -> set[str]:
    return set(kind.__annotations__)


def test_requests() -> None:
    create = names_of(message_create_params.MessageCreateParamsBase)
    assert create <= fields_of(MessagesRequest)
    assert names_of(message_count_tokens_params.MessageCountTokensParams) <= fields_of(CountTokensRequest)
    beta = names_of(beta_params.MessageCreateParamsBase) - {"betas"}
    assert beta - fields_of(MessagesRequest) <= BETA_REFUSED
    assert fields_of(MessagesRequest) - beta - create == {"stream", "temperature", "top_k", "top_p"}


def test_nested_records() -> None:
    assert names_of(types.MetadataParam) <= fields_of(Metadata)
    assert names_of(types.OutputConfigParam) <= fields_of(OutputConfig)
    for kind in (
        types.ThinkingConfigEnabledParam,
        types.ThinkingConfigDisabledParam,
        types.ThinkingConfigAdaptiveParam,
    ):
        assert names_of(kind) <= fields_of(ThinkingConfig)
    for kind in (types.ToolChoiceAutoParam, types.ToolChoiceAnyParam, types.ToolChoiceToolParam):
        assert names_of(kind) <= fields_of(ToolChoice)


def test_blocks_and_tools() -> None:
    for kind, params in (
        ("text", types.TextBlockParam),
        ("thinking", types.ThinkingBlockParam),
        ("redacted_thinking", types.RedactedThinkingBlockParam),
        ("tool_use", types.ToolUseBlockParam),
        ("tool_result", types.ToolResultBlockParam),
    ):
        assert names_of(params) <= set(_FIELDS[kind]), kind
    assert names_of(types.ToolParam) - set(_KNOWN) == {"defer_loading", "input_examples"}

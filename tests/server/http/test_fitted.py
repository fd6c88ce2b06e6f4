"""Integers written as 40.0 are taken as such, in every dialect; fractions are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from realizar.server.errors import ApiError
from realizar.server.http.body import convert
from realizar.server.ollama.records import ChatRequest as OllamaChat
from realizar.server.openai.records import CompletionRequest
from realizar.server.responses.records import ResponsesRequest

CASES: list[tuple[type[msgspec.Struct], dict[str, Any], dict[str, Any]]] = [
    (ResponsesRequest, {"input": "a", "max_output_tokens": 3.0}, {"input": "a", "max_output_tokens": 3}),
    (
        OllamaChat,
        {"model": "a", "options": {"top_k": 40.0, "num_predict": -1.0, "temperature": 1.0}, "keep_alive": 5.0},
        {"model": "a", "options": {"top_k": 40, "num_predict": -1, "temperature": 1.0}, "keep_alive": 5.0},
    ),
    (CompletionRequest, {"prompt": [[1.0, 2]], "seed": 1e20}, {"prompt": [[1, 2]], "seed": 10**20}),
]


@pytest.mark.parametrize(("record", "given", "same"), CASES, ids=[case[0].__name__ for case in CASES])
def test_whole_numbers_are_integers_where_fractions_are_not_taken(
    record: type[msgspec.Struct], given: dict[str, Any], same: dict[str, Any]
) -> None:
    converted = convert(given, record)
    assert converted == convert(same, record)
    assert repr(converted) == repr(convert(same, record))


@pytest.mark.parametrize("value", [40.5, "40", True, [40.0], 1e-300])
def test_other_values_are_refused_by_name(value: object) -> None:
    with pytest.raises(ApiError) as caught:
        convert({"model": "a", "options": {"top_k": value}}, OllamaChat)
    assert caught.value.param == "options.top_k"

"""Records of `/v1/rerank` and `/v1/score`, with vLLM's and Jina's names."""

from __future__ import annotations

import msgspec

from realizar.server.openai.records.answers import Usage


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to order documents. Results have their texts unless `return_documents` is false.

    Attributes:
        top_n: number of results; null and 0, vLLM's default, are all.
    """

    model: str | None = None
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    user: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for scores of pairs. One `text_1` is paired with each `text_2`."""

    model: str | None = None
    text_1: str | list[str]
    text_2: str | list[str]
    user: str | None = None


class RerankResult(msgspec.Struct, omit_defaults=True):
    """A document's place in the request, and its score between 0 and 1."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(msgspec.Struct):
    """The documents of the highest scores first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


class Score(msgspec.Struct):
    """The score of a pair, between 0 and 1."""

    index: int
    score: float
    object: str = "score"


class ScoreAnswer(msgspec.Struct):
    """The scores in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: str = "list"

"""The record of `/v1/completions`."""

from __future__ import annotations

from realizar.server.openai.records.chat import ResponseFormat
from realizar.server.openai.records.sampling import GenerationFields


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. `prompt` is a text, token ids, or a list of either; null starts from nothing but BOS.

    With `suffix` the answer fills in what lies between the prompt and the suffix.
    """

    prompt: str | list[str | int | list[int]] | None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    suffix: str | None = None

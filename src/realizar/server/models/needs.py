"""Needs of requests that a model's facts decide, so that no model is loaded for a request which it can't serve.

The same is checked again, with the same errors, where the request is planned: a loaded model has more to go by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from realizar.errors import ContextLengthError
from realizar.request import Pooling
from realizar.server.errors import ApiError, refused
from realizar.server.model_facts import ModelFacts
from realizar.server.settings import ServerSettings

Need: TypeAlias = Callable[[str, ModelFacts, int, ServerSettings], None]
"""Refuses by a model's name, its facts, the tokens of its longest request, and the server's settings.

Raises ApiError or ContextLengthError."""


def nothing(_name: str, _facts: ModelFacts, _max_tokens: int, _settings: ServerSettings) -> None:
    """The need of a request that any model serves."""


def chats(*, max_tokens: int | None = None, own_template: bool = False) -> Need:
    """The need of a conversation: a chat template, unless the request brings one, which is refused or accepted later.

    An answer of `max_tokens` is refused where the context has no room for it; None takes what is left.
    """

    def check(_name: str, facts: ModelFacts, most: int, _settings: ServerSettings) -> None:
        if facts.template is None and not own_template:
            raise no_template()
        _check_fits(1, max_tokens, most)

    return check


def embeds(name: str, facts: ModelFacts, _max_tokens: int, settings: ServerSettings) -> None:
    embedding_pooling(name, facts.pooling, settings)


def ranks(name: str, facts: ModelFacts, _max_tokens: int, _settings: ServerSettings) -> None:
    if not facts.ranks:
        raise no_ranker(name)


def completes(prompt: object, max_tokens: int | None) -> Need:
    """The need of prompts that are completed: room in the context, with `max_tokens` as of `chats`.

    `prompt` is a text, token ids, or a list of either; None where prompts are cut. Only token ids have a known length.
    """
    longest = max(map(_num_ids, _prompts(prompt)), default=0)

    def check(_name: str, _facts: ModelFacts, most: int, _settings: ServerSettings) -> None:
        _check_fits(max(longest, 1), max_tokens, most)

    return check


def no_template() -> ApiError:
    text = "the model has no chat template, so it can't chat: it may be a base model; use /v1/completions"
    return refused(text, "messages", "no_chat_template")


def no_ranker(name: str) -> ApiError:
    text = f"The model {name} is not a reranker: it has no head for scores"
    return refused(text, "model", "ranking_not_supported")


def embedding_pooling(name: str, own: Pooling | None, settings: ServerSettings) -> Pooling:
    """The pooling of a model's embeddings: the option's, or that which the model was made for.

    It raises ApiError 400 if the model was not made for embeddings.
    """
    pooling = settings.embeddings or own
    if pooling is None:
        text = f"The model {name} was not made for embeddings; the option --embeddings serves them anyway"
        raise refused(text, "model", "embeddings_not_supported")
    return pooling


def _check_fits(num_prompt_tokens: int, max_tokens: int | None, most: int) -> None:
    """Refuse a request whose prompt has at least so many tokens, if it can't fit."""
    wanted = num_prompt_tokens + max(max_tokens or 0, 0)
    if wanted > most:
        raise ContextLengthError(
            f"{'the prompt is too long: ' if num_prompt_tokens >= most else ''}this model's maximum context length is "
            f"{most} tokens; the prompt has {num_prompt_tokens} or more and {max_tokens or 0} are to be generated: "
            f"together {wanted}",
            "prompt" if num_prompt_tokens >= most else "max_tokens",
        )


def _prompts(prompt: object) -> Sequence[object]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _num_ids(prompt: object) -> int:
    return len(prompt) if isinstance(prompt, list) else 0

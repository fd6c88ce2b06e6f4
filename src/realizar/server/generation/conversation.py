"""`Conversation`: a conversation to answer, as each dialect reads it from its request."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realizar.images.given import GivenImage
from realizar.images.prepare import ANY_SIZE, PixelBounds
from realizar.server.errors import refused
from realizar.server.generation.sampling import SamplingWishes
from realizar.server.generation.tools import ToolPlan

MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation to answer.

    Attributes:
        messages: in the form that chat templates take (OpenAI's), checked; images are parts as of `take_images`.
        variables: the template's other variables, as `template_variables` checked them.
        documents: documents for the template to show.
        reasoning_effort: one of `EFFORTS`; None is the model's own.
        template: a template in place of the model's own.
        add_prompt: end the prompt where the answer begins.
        continues: the prompt ends within the last message, an assistant's with text, and the answer goes on with it.
        bounded_by_context: the request's `max_tokens` may be more than the context leaves, which then ends the answer.
        drops_oldest: drop the oldest turns of a conversation that leaves too little of the context.
        keep_last: cut the prompt to its last tokens; -1 is the length of the context, None cuts nothing.
        cache_salt: keeps the cache of one tenant from another's.
        tokens_as_ids: log-probabilities name tokens by their ids.
        prediction: text that the answer may repeat in part, from which drafts are taken.
        reports_progress: get deltas that tell how much of the prompt has been read.
        image_bounds: how large images are read.
        names: the dialect's names of the fields that errors name: `messages`, `tools`, `structured` (the constraint on
            the answer) and others by their names here. A name that is not listed stays.
    """

    messages: Sequence[dict[str, Any]]
    tools: ToolPlan
    wishes: SamplingWishes
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    reasoning_effort: str | None = None
    template: str | None = None
    add_prompt: bool = True
    continues: bool = False
    bounded_by_context: bool = False
    drops_oldest: bool = False
    keep_last: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    tokens_as_ids: bool = False
    prediction: str = ""
    reports_progress: bool = False
    image_bounds: PixelBounds = ANY_SIZE
    names: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def log_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Say something about requests that their client sends again and again."""
    logger.info(message, *args)


def turn(
    role: str, texts: Sequence[str], thoughts: Sequence[str] = (), calls: Sequence[Any] = (), between: str = ""
) -> dict[str, Any]:
    """A message whose texts are joined, and whose content is null where it has nothing but calls.

    Texts are joined once, as there may be thousands.
    """
    message: dict[str, Any] = {"role": role, "content": between.join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = between.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def image_part(image: GivenImage) -> dict[str, Any]:
    return {"type": "image", "image": image}


def wants_low(path: str, detail: object) -> bool:
    """True for OpenAI's `detail: low`; the others are as the model reads an image. Raises ApiError: 400; it is none."""
    if detail not in (None, "auto", "low", "high", "original"):
        raise refused(f"{path} must be auto, low, high or original", path, "invalid_value")
    return detail == "low"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def parts_of(content: Any) -> list[dict[str, Any]]:
    """A content as parts, whether it is text or parts already."""
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return list(content or ())


def check_num_messages(given: Sequence[object], path: str = "messages") -> None:
    """Raise ApiError (400) for a request without messages, or with too many, in the field `path`."""
    if not given:
        raise refused(f"{path} must not be empty", path, "empty_array")
    if len(given) > MAX_MESSAGES:
        raise refused(f"{path} has {len(given)} entries; at most {MAX_MESSAGES} are allowed", path)


def can_continue(last: Mapping[str, Any]) -> bool:
    """True if an answer may go on with a checked message: it is the assistant's, has text and calls no tool."""
    return last["role"] == "assistant" and "tool_calls" not in last and bool(text_of([last]))


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        texts += [part["text"] for part in parts if "text" in part]
        for call in message.get("tool_calls", ()):
            arguments = call["function"].get("arguments", "")
            texts.append(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
    return "\n".join(texts)

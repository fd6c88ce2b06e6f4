"""`PromptReader` turns what callers of `LLM` give, prompts, conversations and parameters, into what an engine runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.given_embeddings import PLACEHOLDER, prompt_embeddings
from realizar.engine.images import PlacedImage, check_bounds, check_room, given_images, open_images, take_images
from realizar.engine.llm_options import template_variables
from realizar.errors import InvalidRequestError, RealizarError
from realizar.images.given import open_all
from realizar.images.prepare import read_bounds
from realizar.models.pooling import default_pooling
from realizar.request import Pooling, PromptEmbeddings
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.generation_defaults import default_sampling
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.parsers.choose import AnswerFormat, find_format
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.templates.chat_messages import Message
from realizar.tokenizer.templates.chat_template import ChatTemplate


class EmbedsPrompt(TypedDict):
    """A prompt of embeddings, one for each token: numbers [tokens, hidden_size], as `PromptEmbeddings` has them."""

    prompt_embeds: ArrayLike


Prompt: TypeAlias = "str | Sequence[int] | EmbedsPrompt"
Conversation: TypeAlias = "Sequence[Message]"
Samplings: TypeAlias = "SamplingParams | Sequence[SamplingParams] | None"
Tools: TypeAlias = "Sequence[Mapping[str, Any]] | None"


class PromptTokens(NamedTuple):
    """A prompt's text, or None where something else was given, its token ids, and embeddings in place of theirs.

    `rope_positions` are those of `Request`, and `images` those whose embeddings are still to be made.
    """

    text: str | None
    token_ids: list[int]
    embeddings: tuple[PromptEmbeddings, ...] = ()
    rope_positions: bytes = b""
    images: tuple[PlacedImage, ...] = ()


_WANTED = "a prompt must be text, token ids or {'prompt_embeds': ...}"


class PromptReader:
    """Reads what callers give, by a model's tokenizer, defaults, and chat template or `chat_template` in its place.

    A configuration has the encoder of its images.

    UnsupportedModelError, TokenizerError: the vocabulary can't be used. CheckpointError: advised sampling is malformed.
    Both of these as of `open_images` too.
    """

    def __init__(self, checkpoint: Checkpoint, chat_template: str | None, config: EngineConfig) -> None:
        self._checkpoint, self._chat_template = checkpoint, chat_template
        self.tokenizer = load_tokenizer(checkpoint)
        self._images = open_images(checkpoint, self.tokenizer, config)
        self.default_sampling = default_sampling(checkpoint)

    def prompt(self, prompt: Prompt) -> PromptTokens:
        """It raises InvalidRequestError for what is neither text nor token ids nor embeddings."""
        if isinstance(prompt, str):
            return PromptTokens(prompt, self.tokenizer.encode(prompt))
        if isinstance(prompt, Mapping) and prompt.keys() == {"prompt_embeds"}:
            given = prompt_embeddings(prompt["prompt_embeds"])
            return PromptTokens(None, [PLACEHOLDER] * given.num_tokens, (given,))
        _check_sequence(prompt)
        return PromptTokens(None, [_token_id(token_id) for token_id in prompt])

    def prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[PromptTokens]:
        """Tokenize one prompt or several; a sequence that starts with a number is one prompt of token ids."""
        if isinstance(prompts, str | Mapping):
            return [self.prompt(prompts)]
        _check_sequence(prompts)
        items: list[Any] = list(prompts)
        one = bool(items) and not isinstance(items[0], str | Sequence | Mapping)
        return [self.prompt(items)] if one else [self.prompt(item) for item in items]

    def plan_chat(self, messages: Conversation, tools: Tools, variables: Mapping[str, Any]) -> PromptTokens:
        """Render a conversation as the tokens of its prompt; of its images no more than the headers are read.

        ChatTemplateError: no template, or it refuses or fails. InvalidRequestError: a message or variable is malformed,
        or an image.
        """
        marked, given = take_images(given_images(messages))
        variables = dict(variables)
        bounds = read_bounds(variables.pop("mm_processor_kwargs", None))
        check_bounds(self._images, bounds)
        if given and self._images is None:
            raise InvalidRequestError(f"{given[0].where} is an image, and the model reads text only", "messages")
        token_ids = self._template.encode(marked, tools, **template_variables(variables))
        if not given or self._images is None:
            return PromptTokens(None, token_ids)
        images = open_all(given)
        token_ids, starts, positions = self._images.expand(token_ids, images, bounds)
        placed = tuple(self._images.prepare(*each, bounds) for each in zip(images, starts, strict=True))
        return PromptTokens(None, token_ids, rope_positions=positions, images=placed)

    def chat(self, messages: Conversation, tools: Tools, variables: Mapping[str, Any], max_tokens: int) -> PromptTokens:
        """The prompt of a conversation with the pictures of its images, which the engine encodes.

        Raises as `plan_chat` and `ImageReader.pictures`. ContextLengthError: it has images, and more than
        `max_tokens`.
        """
        return self._decoded([self.plan_chat(messages, tools, variables)], max_tokens)[0]

    def chats(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Tools,
        variables: Mapping[str, Any],
        max_tokens: int,
    ) -> list[PromptTokens]:
        """The prompts of one conversation or several, as `chat` makes them; no image is decoded if one is too long."""
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        return self._decoded([self.plan_chat(each, tools, variables) for each in conversations], max_tokens)

    def _decoded(self, planned: list[PromptTokens], max_tokens: int) -> list[PromptTokens]:
        if self._images is None:
            return planned
        for prompt in planned:
            if prompt.images:
                check_room(len(prompt.token_ids), max_tokens)
        return [each._replace(embeddings=self._images.pictures(each.images), images=()) for each in planned]

    def samplings(self, given: Samplings, count: int) -> list[SamplingParams]:
        """The parameters of each of `count` prompts: one for all, one for each, or the model's default for None.

        InvalidRequestError: the numbers of parameters and prompts differ, or a value is not `SamplingParams`.
        """
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling] * count
        several: Any = given  # callers need not check types
        listed: list[Any] = list(several) if isinstance(several, Sequence) else [several]
        for each in listed:
            if not isinstance(each, SamplingParams):
                found = type(each).__name__
                raise InvalidRequestError(f"sampling_params must be SamplingParams, not {found}", "sampling_params")
        if len(listed) != count:
            raise InvalidRequestError(
                f"{len(listed)} sampling parameters were given for {count} prompts: give one for all, or one for each",
                "sampling_params",
            )
        return listed

    def pooling(self, given: Pooling | None) -> Pooling:
        """The pooling of embeddings: the given one, or that which the model was made for.

        It raises InvalidRequestError if it is unknown, or None is given and the model was made for none.
        """
        found = given or default_pooling(self._checkpoint)
        if found is None:
            raise InvalidRequestError(
                "this model was not made for embeddings; pooling='mean' or pooling='last' takes its hidden states",
                "pooling",
            )
        if found not in ("mean", "last"):
            raise InvalidRequestError(f"pooling must be 'mean' or 'last', not {found!r}", "pooling")
        return found

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's answers to chat prompts.

        It raises ChatTemplateError if the model has no template.
        """
        return find_format(self._template.source())

    def new_text(self, sampling: SamplingParams) -> StopChecker:
        return StopChecker(self.tokenizer, sampling)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        texts = {} if self._images is None else self._images.template_texts
        return ChatTemplate(self.tokenizer, self._chat_template, replaced=texts)


def _check_sequence(value: Any) -> None:
    """Refuse what has no items, and mappings and bytes, whose items would be taken for prompts or token ids."""
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes):
        raise InvalidRequestError(f"{_WANTED}, not {type(value).__name__}", "prompt")


def _token_id(value: Any) -> int:
    if isinstance(value, str):
        raise InvalidRequestError("one prompt is wanted here, not a list of texts", "prompt")
    try:
        return int(value.__index__())
    except AttributeError:
        raise InvalidRequestError(f"{_WANTED}, not {type(value).__name__}", "prompt") from None


def unit_vectors(pooled: Sequence[tuple[float, ...] | None], hidden_size: int) -> NDArray[np.float32]:
    """Pooled states as rows, float32 [len(pooled), hidden_size], divided by their length; zeros stay zeros.

    It raises RealizarError if an engine gave none for one of them.
    """
    vectors = np.zeros((len(pooled), hidden_size), np.float32)
    for row, values in zip(vectors, pooled, strict=True):
        if values is None:
            raise RealizarError("the engine gave no vector")
        state = np.asarray(values, np.float64)
        length = float(np.linalg.norm(state))
        row[:] = state / length if length > 0 else state
    return vectors

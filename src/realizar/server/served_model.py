"""`ServedModel`: the API process's view of the model. The engine has the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import EngineLink
from realizar.engine.images import ImageReader, open_images
from realizar.errors import ChatTemplateError, InvalidRequestError
from realizar.models.ranking import ranking_head
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from realizar.server.http.work import Lane
from realizar.server.model_facts import ModelFacts, read_facts
from realizar.server.ranker import Ranker
from realizar.tokenizer.generation_defaults import default_sampling
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.templates.chat_template import ChatTemplate, Compile
from realizar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model.

    Attributes:
        names: ids that requests may use; answers carry the first.
        template: the chat template, or None.
        default_sampling: sampling of requests without parameters: from the command line, the model's files or built in.
        context_length: tokens of a request, prompt and output; the engine may bound them further.
        created_s: Unix time.
        ranker: makes scores of pairs of texts, or None if the model was not made for them.
        images: reads images, or None if the model reads text only. image_lane: where it decodes them.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    default_sampling: SamplingParams
    context_length: int
    created_s: int = field(default_factory=lambda: int(time.time()))
    facts: ModelFacts = field(default_factory=ModelFacts)
    ranker: Ranker | None = None
    images: ImageReader | None = None
    image_lane: Lane = field(default_factory=lambda: Lane(1, "images"), repr=False)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise InvalidRequestError("the served model needs a name", "served_model_name")

    @property
    def name(self) -> str:
        return self.names[0]

    def engine(self, link: EngineLink, max_queued: int | None, pooling: Pooling | None) -> AsyncEngine:
        """An engine whose text is of this model's vocabulary; the arguments are those of `AsyncEngine`."""
        new_text = partial(StopChecker, self.tokenizer)
        return AsyncEngine(link, new_text, self.tokenizer.eos_ids, max_queued=max_queued, pooling=pooling)


def make_served_model(
    checkpoint: Checkpoint,
    names: Sequence[str],
    context_length: int,
    sampling: SamplingParams | None = None,
    chat_template: str | None = None,
    created_s: int | None = None,
    compiler: Compile | None = None,
    config: EngineConfig | None = None,
) -> ServedModel:
    """Make the served model from a checkpoint. This reads the vocabulary, and of the weights a reranker's head.

    Args:
        sampling: default sampling; None takes the values in the model's files, then the built-in ones.
        chat_template: text of a template that replaces the model's own.
        created_s: Unix time; None takes the present.
        compiler: as of `ChatTemplate`.
        config: has the encoder of images; None is the default.

    Raises:
        TokenizerError: the vocabulary is missing, or can't be reproduced exactly.
        CheckpointError: a file is malformed.
        UnsupportedModelError: an encoder of images that was named does not run, or is of another model.
    """
    tokenizer = load_tokenizer(checkpoint)
    images = open_images(checkpoint, tokenizer, config or EngineConfig())
    head = ranking_head(checkpoint)
    template: ChatTemplate | None = None
    try:
        template = ChatTemplate(tokenizer, chat_template, compiler, {} if images is None else images.template_texts)
    except ChatTemplateError:
        template = None  # a chat request then gets an error
    return ServedModel(
        tuple(names),
        tokenizer,
        template,
        sampling or default_sampling(checkpoint),
        context_length,
        int(time.time()) if created_s is None else created_s,
        replace(
            read_facts(checkpoint, chat_template, compiler),
            fills_in=tokenizer.fill_in is not None,
            largest_image=None if images is None else images.largest,
        ),
        None if head is None else Ranker(head, tokenizer),
        images,
    )

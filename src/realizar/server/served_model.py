"""`ServedModel`: what the API process knows of the model. Weights are the engine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import ChatTemplateError, InvalidRequestError
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.generation_defaults import default_sampling
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the API shows it.

    Attributes:
        names: ids that requests may use; the first is the one that answers carry.
        tokenizer: of the model.
        template: None for a model without a chat template.
        default_sampling: of requests that name none: the command line's, the files' advice, what is built in.
        context_length: tokens of a request, prompt and output; the engine may bound them further.
        created_s: Unix time.
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    default_sampling: SamplingParams
    context_length: int
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise InvalidRequestError("a served model needs a name", "served_model_name")

    @property
    def name(self) -> str:
        return self.names[0]


def make_served_model(
    checkpoint: Checkpoint,
    names: Sequence[str],
    context_length: int,
    sampling: SamplingParams | None = None,
    chat_template: str | None = None,
) -> ServedModel:
    """What the API needs of a checkpoint; reads the vocabulary and no weights.

    Args:
        names: ids that requests may use, the first foremost.
        context_length: tokens of a request, prompt and output.
        sampling: defaults of requests; None takes the files' advice, then what is built in.
        chat_template: text of a template to use in place of the model's own.

    Raises:
        TokenizerError: no vocabulary, or one that can't be reproduced exactly.
        CheckpointError: a malformed one.
    """
    tokenizer = load_tokenizer(checkpoint)
    template: ChatTemplate | None = None
    try:
        template = ChatTemplate(tokenizer, chat_template)
    except ChatTemplateError:
        template = None  # `chat` says so when asked
    return ServedModel(tuple(names), tokenizer, template, sampling or default_sampling(checkpoint), context_length)

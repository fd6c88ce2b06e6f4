"""`Request`: one prompt, tokenized and checked, on its way into the engine. Standard library only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from realizar.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request: what all clients use is shared by client.

    Attributes:
        name: unique; "" if there is none.
        weight: size of its share beside those of the others, at least 1.
        has_own_cache: True if its requests find cached blocks of its own alone.
    """

    name: str = ""
    weight: int = 1
    has_own_cache: bool = False

    def salt(self, wanted: str | None) -> str | None:
        """The salt of its requests in the prefix cache; `wanted` is the request's own."""
        if not self.has_own_cache:
            return wanted
        return self.name if wanted is None else f"{self.name} {wanted}"


NO_CLIENT = Client()

DIGEST_BYTES = 32
if TYPE_CHECKING:
    Values: TypeAlias = bytes | memoryview
else:
    Values = bytes  # what is decoded of frames


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels whose embeddings the engine makes: uint8 [height, width, 3], of red, green and blue.

    `num_runs`: so many runs of embeddings, of equal length and one after another, have its features.
    """

    pixels: bytes = field(repr=False)
    height: int
    width: int
    num_runs: int


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """Embeddings that a request brings for a run of its prompt's tokens, in place of those of their ids.

    Each stands where a layer's input does: after the embedding's scale, as in llama.cpp, and as `inputs_embeds` of
    Gemma 3 in transformers. Where transformers scales `inputs_embeds` (Gemma 2, Granite), they are scaled before.
    `realizar.engine.given_embeddings.prompt_embeddings` makes one.

    Attributes:
        start: number of prompt tokens before the run.
        values: float32 [tokens, hidden_size], finite; empty where the engine is to make them of a picture, which then
            are a view of bytes.
        digests: 32 bytes for each token: equal ones are of equal embeddings, and where these see each other of equal
            runs.
        is_seen_whole: its tokens see each other, as those of an image (`Attention.sees_images_whole`).
        picture: that this run and those after it are to be made of; None where they are there.
    """

    start: int
    values: Values = field(repr=False)
    digests: bytes = field(repr=False)
    is_seen_whole: bool = False
    picture: Picture | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A request with every default resolved; `realizar.engine.frontend.prepare.prepare_request` makes one.

    Attributes:
        request_id: unique among open requests.
        prompt_token_ids: not empty, each within the vocabulary. Under given embeddings an id matters to layers that
            have inputs of their own, which are those of the id, and to the prefix cache; penalties do not count it.
        sampling: with `seed` set; `stop_token_ids` are all ids that end a choice, the model's included unless ignored.
        max_tokens: tokens to generate per choice; 0 only scores or pools the prompt.
        arrival_s: of `time.monotonic`.
        priority: lower is sooner; equal priorities start in turn by client, and first come, first served for each.
            Each step of priority is worth 64 turns, so that a waiting request is not overtaken for ever.
        cache_salt: requests share cached blocks only with those of the same salt; the client's, where it has its own.
        pooling: the final hidden state wanted: of the last token, or the mean over the prompt. A pooled request
            generates nothing: its `max_tokens` is 0.
        prompt_marks: numbers of prompt tokens after which a message ends, ascending. A model whose layers have a state
            keeps copies of it there.
        call_ids: ids with each of which a call of a tool begins in the answer, ascending. A copy of the state before
            the first one is kept too, as clients write calls anew.
        reports_progress: True if the engine tells how much of the prompt it has read, after each step that reads some.
        client: whose share of the places, and of the work before it runs, the request takes.
        prediction: ids of a text that the answer may repeat in part, from which drafts are taken.
        embeddings: that the request brings for some of the prompt's tokens, ascending and without overlap. Those of
            images may be longer than others, by what is added after the first layers (`ModelSpec.deepstack`).
        rope_positions: int32 [3, prompt tokens], of a rope's axes; tokens after the prompt go on beyond the largest.
            Empty where each token has its place in the text on all of them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    arrival_s: float = field(default_factory=time.monotonic)
    priority: int = 0
    cache_salt: str | None = None
    pooling: Pooling | None = None
    client: Client = NO_CLIENT
    reports_progress: bool = False
    prompt_marks: tuple[int, ...] = ()
    call_ids: tuple[int, ...] = ()
    embeddings: tuple[PromptEmbeddings, ...] = ()
    prediction: tuple[int, ...] = ()
    rope_positions: bytes = field(default=b"", repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def shows_pictures(self) -> bool:
        """True if embeddings are still to be made of pictures."""
        return any(run.picture is not None for run in self.embeddings)

    @property
    def longest_whole_run(self) -> int:
        """Tokens of the longest run of embeddings that is seen whole; 0 without any."""
        return max((run.num_tokens for run in self.embeddings if run.is_seen_whole), default=0)

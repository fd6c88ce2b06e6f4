"""Random conversations with a core: turns, edits of early messages, branches, tenants, aborts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from realizar.engine.core.engine_core import EngineCore
from realizar.errors import RealizarError
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from step_inputs import TokenOutput, stepped
from waits import HANG_S

END_OF_MESSAGE = 96
FIRST_IMAGE = 97
"""The id that stands for the first image in a message; others follow."""
_NUM_WORDS = 93  # ids of messages are below it
_OPENING = (95, 94)  # the generation prompt


@dataclass
class Conversation:
    """One user's messages, each without its end.

    Attributes:
        salt: of the user's tenant.
        drops_answers: the template shows only the last tokens of earlier answers, as templates drop reasoning.
    """

    salt: str | None
    drops_answers: bool
    messages: list[tuple[int, ...]] = field(default_factory=list)

    def prompt(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids, and the numbers of tokens after which a message ends."""
        token_ids: list[int] = []
        marks = []
        for message in self.messages:
            token_ids += [*message, END_OF_MESSAGE]
            marks.append(len(token_ids))
        return (*token_ids, *_OPENING), tuple(marks)

    def answered(self, token_ids: list[int]) -> None:
        """Take in an answer."""
        self.messages.append(tuple(token_ids[-3:] if self.drops_answers else token_ids))


class Conversations:
    """Users who begin alike, go on, edit what they wrote, and branch off; the same seed gives the same.

    Args:
        scale: tokens of the shortest message of several words; a conversation of 120 times as many is begun anew.
        num_images: that users show, some of them in half of their messages.
    """

    def __init__(self, rng: random.Random, scale: int, num_images: int = 0) -> None:
        self._rng, self._scale, self._num_images = rng, scale, num_images
        self._systems = [self._text(20 * scale, 40 * scale) for _ in range(3)]
        self._all: list[Conversation] = []
        self._numbers = itertools.count()

    def next(self) -> Conversation:
        """A conversation that waits for an answer."""
        rng = self._rng
        known = [each for each in self._all if each.messages]
        if not known or rng.random() < 0.25:
            salt = rng.choice([None, None, "a", "b"])
            made = Conversation(salt, rng.random() < 0.4, [rng.choice(self._systems)])
        else:
            old = rng.choice(known[-8:])
            made = Conversation(old.salt, old.drops_answers, list(old.messages))
            if rng.random() < 0.3:  # an edit, or a branch
                del made.messages[rng.randrange(1, len(made.messages) + 1) :]
                if rng.random() < 0.2:
                    made.salt = rng.choice([None, "a", "b"])
        if self._num_images and rng.random() < 0.3:
            self._swap_image(made)
        made.messages.append(self._shown() + self._text(1, 24 * self._scale))
        if len(made.prompt()[0]) > 120 * self._scale:
            del made.messages[1:-1]
        self._all.append(made)
        return made

    def _swap_image(self, talk: Conversation) -> None:
        """Show others in place of the images of a message, among the same words."""
        place = self._rng.randrange(len(talk.messages))
        talk.messages[place] = tuple(
            FIRST_IMAGE + (each + 1 - FIRST_IMAGE) % self._num_images if each >= FIRST_IMAGE else each
            for each in talk.messages[place]
        )

    def _shown(self) -> tuple[int, ...]:
        if not self._num_images or self._rng.random() < 0.5:
            return ()
        return tuple(FIRST_IMAGE + self._rng.randrange(self._num_images) for _ in range(self._rng.choice((1, 1, 2))))

    def _text(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(_NUM_WORDS) for _ in range(self._rng.randint(least, most)))


class Chat:
    """Users in conversation with a core, which is audited after each step.

    Attributes:
        ended: every request that came to its end, with the outputs of each choice.
        lost: requests that were aborted, or ended for lack of memory.

    Args:
        scale: of `Conversations`.
        few_ids: answers have three ids, so that drafts come true.
        grammar: that half of the answers follow, and the id that ends them.
        aborts: some requests are aborted.
        num_images: of `Conversations`.
    """

    def __init__(
        self, seed: int, core: EngineCore, scale: int = 1, *, few_ids: bool = False,
        grammar: tuple[StructuredOutput, int] | None = None, aborts: bool = True, num_images: int = 0,
    ) -> None:  # fmt: skip
        self.rng, self.core, self._grammar, self._aborts = random.Random(seed), core, grammar, aborts
        self._bias = dict.fromkeys((3, 4, 5), 80.0) if few_ids else {}
        self.users = Conversations(self.rng, scale, num_images)
        self.open: dict[str, tuple[Request, Conversation]] = {}
        self.ended: list[tuple[Request, list[list[TokenOutput]]]] = []
        self.arrived = self.lost = 0
        self._found: dict[tuple[str, int], list[TokenOutput]] = {}

    def run(self, arrivals: int) -> None:
        self.run_until(arrivals, all_ended=True)

    def run_until(self, arrivals: int, *, all_ended: bool) -> None:
        """Run until so many requests have arrived, and all of them have ended; or those that are open are lost."""
        while self.arrived < arrivals or (all_ended and self.core.has_work):
            while self.arrived < arrivals and len(self.open) < 6 and self.rng.random() < 0.6:
                self._add()
            if self._aborts and self.open and self.rng.random() < 0.01:
                name = self.rng.choice(list(self.open))
                self.core.abort(name)
                del self.open[name]
                self.lost += 1
            for output in stepped(self.core):
                self._take_in(output)
            self.core.audit()
        self.lost += len(self.open)
        self.open.clear()

    def _add(self) -> None:
        talk = self.users.next()
        request = self.request(talk)
        self.core.add(self._with_embeddings(request))
        self.open[request.request_id] = request, talk
        self.arrived += 1

    def _with_embeddings(self, request: Request) -> Request:
        """As the engine's loop has its pictures encoded before it is queued."""
        if not request.shows_pictures:
            return request
        done: SimpleQueue[Request | RealizarError] = SimpleQueue()
        self.core.embed_later(request, done.put)
        found = done.get(timeout=HANG_S)
        assert isinstance(found, Request), found
        return found

    def request(self, talk: Conversation) -> Request:
        """The next request of a conversation."""
        rng = self.rng
        prompt, marks = talk.prompt()
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9), n=rng.choice([1, 1, 1, 2]),
            logprobs=rng.choice([None, 2]), logit_bias=self._bias, prompt_logprobs=rng.choice([None] * 9 + [1]),
        )  # fmt: skip
        if self._grammar is not None and rng.random() < 0.5:
            structured, end = self._grammar
            sampling = replace(sampling, structured=structured, stop_token_ids=(end,), logit_bias={})
        return Request(
            str(self.arrived), prompt, sampling, rng.randint(1, 24), cache_salt=talk.salt,
            prompt_marks=marks if rng.random() < 0.8 else (),
        )  # fmt: skip

    def _take_in(self, output: TokenOutput) -> None:
        name = output.request_id
        if output.error is not None:
            assert output.error.cause == "memory"
            del self.open[name]
            self.lost += 1
        self._found.setdefault((name, output.choice), []).append(output)
        if output.finish_reason is None or name not in self.open:
            return
        request, talk = self.open[name]
        outputs = [self._found.get((name, choice), []) for choice in range(request.sampling.n)]
        if all(each and each[-1].finish_reason for each in outputs):
            talk.answered([token_id for output in outputs[0] for token_id in output.token_ids])
            self.ended.append((request, outputs))
            del self.open[name]

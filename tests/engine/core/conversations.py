"""Random conversations over the scripted backend's vocabulary: turns, edits of early messages, branches, copies."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from scripted_backend import VOCAB_SIZE

END_OF_MESSAGE = 96
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
        longest: tokens of a conversation at which its user begins another.
    """

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng, self._longest = rng, longest
        self._systems = [self._text(20, 40) for _ in range(3)]
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
        made.messages.append(self._text(1, 24))
        if len(made.prompt()[0]) > self._longest:
            del made.messages[1:-1]
        self._all.append(made)
        return made

    def _text(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCAB_SIZE - 4) for _ in range(self._rng.randint(least, most)))

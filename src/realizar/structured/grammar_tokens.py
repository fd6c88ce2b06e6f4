"""`GrammarTokens`: the tokens of a model over which grammars are compiled and followed. Standard library only."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput

_LOG = logging.getLogger(__name__)

Encode = Callable[[str], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class EncodeSource:
    """How a process makes the model's encoder for itself: by a function of a module, and its argument.

    It encodes text to ids without special ones, or to None where it can't.
    """

    module: str
    function: str
    argument: str

    def load(self) -> Encode | None:
        """The encoder; None, and a warning, where it can't be made, as of a file that is gone."""
        try:
            encode: Encode = getattr(importlib.import_module(self.module), self.function)(self.argument)
        except Exception as error:  # noqa: BLE001 - whatever it is, grammars can be followed without
            _LOG.warning("text that grammars force is cut into the longest tokens: %s", error)
            return None
        return encode


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """A model's tokens, as bytes.

    Attributes:
        token_bytes: text that each id adds; `Tokenizer.vocabulary_bytes`.
        special_ids: control tokens; they are no text, whatever their bytes are.
        end_ids: ids that end an answer; those beyond the logits do not count.
        vocab_size: logits per row; ids from `len(token_bytes)` on are never allowed.
        encode_source: makes what cuts text into tokens about which a grammar leaves no choice; without it the longest
            token at each place is taken.

    Raises:
        InvalidRequestError: there are no end ids, so that no output could be complete.
    """

    token_bytes: Sequence[bytes]
    special_ids: Collection[int]
    end_ids: Collection[int]
    vocab_size: int
    encode_source: EncodeSource | None = None

    def __post_init__(self) -> None:
        if not self.ends:
            raise InvalidRequestError("structured output needs a token that ends an answer; the model has none")

    @property
    def ends(self) -> tuple[int, ...]:
        """End ids that have a logit, ascending."""
        return tuple(sorted({index for index in self.end_ids if index < self.vocab_size}))

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask over all logits."""
        return -(-self.vocab_size // 32)


# Names of the kinds of structured output in messages.

_NAMES = {"json_schema": "JSON schema", "lark": "Lark grammar", "regex": "regular expression"}


def refusal(structured: StructuredOutput, reason: str) -> InvalidRequestError:
    """The error of a refused grammar; `reason` is one line."""
    kind = _NAMES.get(structured.kind, structured.kind)
    return InvalidRequestError(f"the {kind} can't be honoured: {reason}", "structured")

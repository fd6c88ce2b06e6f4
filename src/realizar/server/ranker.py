"""`Ranker`: prompts of a query and a document for a reranker, and their scores."""

from __future__ import annotations

import re
from collections.abc import Sequence

from realizar.models.ranking import RankingHead
from realizar.tokenizer.templates.control_texts import ControlTextHider
from realizar.tokenizer.tokenizer import Tokenizer

_TEMPLATE = "rerank"
_PLACES = re.compile(r"\{(query|document)\}")


class Ranker:
    """Makes the prompt of a pair by the model's own template, or as llama.cpp does where it has none.

    Control tokens' texts in queries and documents stay text: a document can't end the prompt's part that it is in. The
    tokenizer's `rerank` template, if any, has `{query}` and `{document}`.
    """

    def __init__(self, head: RankingHead, tokenizer: Tokenizer) -> None:
        self._head, self._tokenizer = head, tokenizer
        self._template = tokenizer.chat_templates.get(_TEMPLATE)
        self._hider = ControlTextHider(tokenizer.control_texts().union(tokenizer.mark_ids))

    def prompt(self, query: str, document: str) -> list[int]:
        """Token ids of a pair; InvalidRequestError where a text can't be encoded."""
        if self._template is None:
            return self._concatenated(query, document)
        hidden = self._hider.hide((query, document))
        texts = dict(zip(("query", "document"), (query, document) if hidden is None else hidden.value, strict=True))
        rendered = _PLACES.sub(lambda place: texts[place[1]], self._template)
        return self._tokenizer.encode_rendered(rendered, None if hidden is None else hidden.restore)

    def score(self, hidden_state: Sequence[float]) -> float:
        """The score of a pair, between 0 and 1, from its prompt's last hidden state [hidden_size]."""
        return self._head.score(hidden_state)

    def _concatenated(self, query: str, document: str) -> list[int]:
        """Both texts, with EOS after each and BOS before them where the model wants these."""
        tokenizer = self._tokenizer
        end = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        first, second = (tokenizer.encode(text, add_special=False, parse_special=False) for text in (query, document))
        return [*begin, *first, *end, *second, *end]

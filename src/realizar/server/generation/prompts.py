"""Prompts of a request as token ids. Prompts are cut only if the request asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realizar.errors import ContextLengthError, InvalidRequestError
from realizar.server.api import Api
from realizar.server.errors import refused, unsupported
from realizar.server.http.work import Stop
from realizar.tokenizer.tokenizer import Tokenizer

MAX_TOKENS = 1 << 19
"""Limit for all prompts of one request together, unless the context is longer."""
_GROWTH = 4
_SLACK_TOKENS = 64  # tokens that cutting a text may add to its beginning


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of one prompt, and its text if it came as text."""

    token_ids: tuple[int, ...]
    text: str | None


@dataclass(frozen=True, slots=True)
class Hole:
    """The ids around a prompt that make it the text before a hole, in the order prefix, suffix, middle.

    Attributes:
        before: BOS if the model wants one, and the mark of the prefix.
        after: the mark of the suffix, the suffix, and the mark of the middle.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


def tokenize_prompts(
    given: str | Sequence[str | int | Sequence[int]] | None,
    api: Api,
    stop: Stop,
    *,
    param: str,
    add_special: bool = True,
    suffix: str = "",
    last: int | None = None,
) -> list[Prompt]:
    """Tokenize the prompts of a request, in order. Texts that can't fit the context are not tokenized to their end.

    Args:
        given: a text, token ids, a list of texts or of lists of ids; None is BOS alone.
        stop: checked before each prompt.
        param: the name of the field.
        suffix: what follows the answer to each text, for models that fill in a hole; the texts then may be empty, and
            control tokens' texts in them stay text.
        last: cuts each prompt, as of `keep_last`; only `MAX_TOKENS` bounds it before.

    Raises:
        ApiError, InvalidRequestError: 400; the prompts are empty, mixed or too many, or an id is out of range.
    """
    tokenizer = api.model.tokenizer
    hole = _read_hole(suffix, api, add_special=add_special) if suffix else None
    if given is None:
        if tokenizer.bos_id is None:
            raise refused(f"{param} is null, and the model has no BOS token to start from; give a text", param)
        return [_cut(Prompt((tokenizer.bos_id,), ""), last, api)]
    items = _listed(given, param)
    check_num_prompts(items, param, api.settings.max_prompts)
    prompts: list[Prompt] = []
    num_tokens, most = 0, max(MAX_TOKENS, api.max_tokens)
    each = api.max_tokens if last is None else most
    for place, item in enumerate(items):
        stop.check()
        where = param if len(items) == 1 else f"{param}[{place}]"
        prompt = _tokenize(item, tokenizer, where, each, add_special=add_special, hole=hole)
        num_tokens += len(prompt.token_ids)
        if num_tokens > most and len(items) > 1:
            raise refused(f"{param} has more than {most} tokens; send fewer prompts at once", param, "array_too_long")
        prompts.append(prompt)
    return [_cut(prompt, last, api) for prompt in prompts]


def check_num_prompts(given: Sequence[object], param: str, max_prompts: int) -> None:
    """Raise ApiError (400) for too many prompts."""
    if len(given) > max_prompts:
        raise refused(f"{param} holds {len(given)} prompts; at most {max_prompts} are allowed", param, "array_too_long")


def keep_last(token_ids: Sequence[int], count: int | None, max_tokens: int) -> tuple[int, ...]:
    """Cut a prompt to its last `count` tokens if the request asks for it (`truncate_prompt_tokens`; -1 is the context).

    Raises ApiError: 400; `count` is out of range.
    """
    if count is None:
        return tuple(token_ids)
    if count != -1 and not 1 <= count <= max_tokens:
        raise refused(
            f"truncate_prompt_tokens must be -1 or between 1 and {max_tokens}, not {count}", "truncate_prompt_tokens"
        )
    return tuple(token_ids[-(max_tokens if count == -1 else count) :])


def _cut(prompt: Prompt, last: int | None, api: Api) -> Prompt:
    ids = keep_last(prompt.token_ids, last, api.max_tokens)
    return prompt if len(ids) == len(prompt.token_ids) else Prompt(ids, None)


def check_ids(given: Sequence[int], tokenizer: Tokenizer, where: str) -> None:
    """Raise ApiError (400) for an id that is not in the vocabulary."""
    wrong = next((token_id for token_id in given if not 0 <= token_id < tokenizer.vocab_size), None)
    if wrong is not None:
        raise refused(f"{where} holds token id {wrong}; the vocabulary has 0 to {tokenizer.vocab_size - 1}", where)


def check_fits(text: str, tokenizer: Tokenizer, max_tokens: int, param: str) -> None:
    """Raise ContextLengthError for a text with too many tokens, at a cost that depends on the limit alone.

    A text with more characters than the limit times the longest token is refused without tokenizing. Of other texts,
    growing prefixes are tokenized until the limit is passed.
    """
    limit = f"so the prompt is too long: this model's maximum context length is {max_tokens} tokens"
    if len(text) > (max_tokens + _SLACK_TOKENS) * tokenizer.longest_token:
        raise ContextLengthError(f"{param} has {len(text)} characters, {limit}", param)
    size = 2 * max_tokens + _SLACK_TOKENS
    while size < len(text):
        count = len(tokenizer.encode(text[:size], add_special=False))
        if count > max_tokens + _SLACK_TOKENS:
            raise ContextLengthError(f"{param} has more than {count} tokens, {limit}", param)
        size *= _GROWTH


def _listed(given: str | Sequence[str | int | Sequence[int]], param: str) -> list[str | Sequence[int]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise refused(f"{param} must not be empty", param, "empty_array")
    kinds = {"text" if isinstance(item, str) else "id" if isinstance(item, int) else "ids" for item in given}
    if len(kinds) > 1:
        raise refused(f"{param} mixes texts and token ids", param, "invalid_type")
    if kinds == {"id"}:
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]


def _tokenize(
    item: str | Sequence[int],
    tokenizer: Tokenizer,
    where: str,
    max_tokens: int,
    *,
    add_special: bool,
    hole: Hole | None,
) -> Prompt:
    if not item and hole is None:
        raise refused(f"{where} must not be empty", where, "empty_prompt")
    before, after = (hole.before, hole.after) if hole is not None else ((), ())
    if not isinstance(item, str):
        check_ids(item, tokenizer, where)
        return Prompt((*before, *item, *after), None)
    try:
        check_fits(item, tokenizer, max_tokens, where)
        ids = tokenizer.encode(item, add_special=add_special and hole is None, parse_special=hole is None)
        return Prompt((*before, *ids, *after), item)
    except ContextLengthError:
        raise
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), where) from None


def _read_hole(suffix: str, api: Api, *, add_special: bool) -> Hole:
    """The hole before a suffix. Control tokens' texts in the suffix stay text, as code may contain them.

    Raises:
        ApiError: 400; the vocabulary has no marks for it.
        ContextLengthError: the suffix has more tokens than the context.
    """
    tokenizer = api.model.tokenizer
    marks = tokenizer.fill_in
    if marks is None:
        raise unsupported("suffix", "is not supported: the model can't fill in text")
    check_fits(suffix, tokenizer, api.max_tokens, "suffix")
    ids = tokenizer.encode(suffix, add_special=False, parse_special=False)
    bos = (tokenizer.bos_id,) if add_special and tokenizer.add_bos and tokenizer.bos_id is not None else ()
    return Hole((*bos, marks.prefix), (marks.suffix, *ids, marks.middle))

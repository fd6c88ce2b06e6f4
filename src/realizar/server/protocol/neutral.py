"""Known fields that have no effect here: null and neutral values are accepted, other values are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from realizar.server.errors import unsupported

_Check = Callable[[Any], bool]


def _one_of(*values: Any) -> _Check:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


def _never(value: Any) -> bool:
    return False


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


NEUTRAL: Mapping[str, tuple[_Check, str]] = {
    "allowed_token_ids": (_empty, "not supported; use logit_bias, or structured outputs"),
    "bad_words": (_empty, "not supported; use logit_bias"),
    "include_stop_str_in_output": (_one_of(False), "stop strings are never part of the text"),
    "kv_transfer_params": (_empty, "not supported"),
    "length_penalty": (_one_of(1, 1.0), "beam search is not supported"),
    "logits_processors": (_empty, "not supported"),
    "return_token_ids": (_one_of(False), "not supported; use return_tokens_as_token_ids with logprobs"),
    "skip_special_tokens": (_one_of(True), "control tokens are never part of the text"),
    "spaces_between_special_tokens": (_one_of(True, False), "must be true or false"),
    "use_beam_search": (_one_of(False), "beam search is not supported"),
    "vllm_xargs": (_empty, "not supported"),
    "audio": (_never, "this model does not speak"),
    "continue_final_message": (_one_of(False), "not supported"),
    "function_call": (_one_of("none", "auto"), "deprecated; use tool_choice"),
    "functions": (_empty, "deprecated; use tools"),
    "mm_processor_kwargs": (_empty, "this model takes text alone"),
    "modalities": (_one_of(["text"], []), "this model answers in text alone"),
    "moderation": (_never, "nothing is moderated here"),
    "store": (_one_of(False), "nothing is stored here"),
    "verbosity": (_one_of("medium"), "this model has no such setting"),
    "service_tier": (_one_of("auto", "default"), "this server has one tier"),
    "web_search_options": (_never, "there is no search here; an empty object asks for it too"),
    "suffix": (_empty, "this model does not fill in"),
}


def check_neutral(record: msgspec.Struct) -> None:
    """Check the fields that have no effect here.

    Raises:
        ApiError: 400; a field has a value that is not neutral.
    """
    options = getattr(record, "stream_options", None)
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "padding is not sent")
    for name in record.__struct_fields__:
        rule = NEUTRAL.get(name)
        if rule is not None:
            value = getattr(record, name)
            check, reason = rule
            if value is not None and not check(value):
                raise unsupported(name, reason)

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
    "allowed_token_ids": (_empty, "is not supported; use logit_bias or structured outputs"),
    "bad_words": (_empty, "is not supported; use logit_bias"),
    "include_stop_str_in_output": (_one_of(False), "is not supported: stop strings are never part of the text"),
    "kv_transfer_params": (_empty, "is not supported"),
    "length_penalty": (_one_of(1, 1.0), "is not supported: there is no beam search"),
    "logits_processors": (_empty, "is not supported"),
    "skip_special_tokens": (_one_of(True), "must be true: control tokens are never part of the text"),
    "spaces_between_special_tokens": (_one_of(True, False), "must be true or false"),
    "use_beam_search": (_one_of(False), "must be false: beam search is not supported"),
    "vllm_xargs": (_empty, "is not supported"),
    "audio": (_never, "output is not supported"),
    "function_call": (_one_of("none", "auto"), "is deprecated; use tool_choice"),
    "functions": (_empty, "is deprecated; use tools"),
    "mm_processor_kwargs": (_empty, "is not supported: the model reads text only"),
    "modalities": (_one_of(["text"], []), "must be ['text']: the model answers in text only"),
    "moderation": (_never, "is not supported"),
    "store": (_one_of(False), "is not supported: the server stores no answers"),
    "verbosity": (_one_of("medium"), "is not supported by this model"),
    "service_tier": (_one_of("auto", "default"), "must be auto or default: the server has one tier"),
    "web_search_options": (_never, "is not supported: there is no web search"),
}


def check_neutral(record: msgspec.Struct) -> None:
    """Check the fields that have no effect here.

    Raises:
        ApiError: 400; a field has a value that is not neutral.
    """
    options = getattr(record, "stream_options", None)
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported: the stream has no padding")
    for name in record.__struct_fields__:
        rule = NEUTRAL.get(name)
        if rule is not None:
            value = getattr(record, name)
            check, reason = rule
            if value is not None and not check(value):
                raise unsupported(name, reason)

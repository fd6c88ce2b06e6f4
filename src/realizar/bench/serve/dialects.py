"""Names of a request's fields: realizar's, vLLM's, SGLang's and llama.cpp's, and OpenAI's alone.

A field that a server does not know is left away where it changes nothing (a `min_p` of 0); a kind that needs one is not
sent to that server. `ignore_eos` is not OpenAI's, but most servers know it; it is left away where one refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realizar.bench.serve.kinds import NEUTRAL, Expression, Fields
from realizar.sampling_params import SAMPLERS

_OPENAI = frozenset(
    {each.name for each in SAMPLERS if each.servers == "openai"}
    | {"logit_bias", "logprobs", "stop", "n", "json_schema", "tools", "tool_choice", "ignore_eos"}
)
_VLLM = _OPENAI | {each.name for each in SAMPLERS if each.servers == "vllm"} | {"regex"}
_OURS = _VLLM | {each.name for each in SAMPLERS}


class UnknownFieldsError(Exception):
    """A server has no such fields; the text names them."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One server's names.

    Attributes:
        owner: what its `/v1/models` says of who owns a model.
        known: fields of a kind that it knows, under whatever name; `renamed` are those that it calls otherwise.
        always: fields that every request to it has, so that it does what the others do.
    """

    name: str
    owner: str
    known: frozenset[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)

    def translate(self, fields: Fields, *, chat: bool) -> Fields:
        """A kind's fields as this server takes them. It raises UnknownFieldsError if it does not know some."""
        unknown = sorted(n for n, v in fields.items() if n not in self.known and not _is_neutral(n, v))
        if unknown:
            raise UnknownFieldsError(f"{self.name} has no {', '.join(unknown)}")
        given: Fields = dict(self.always)
        for name, value in fields.items():
            if name in self.known:
                given |= self._spelled(name, value, chat=chat)
        return given

    def _spelled(self, name: str, value: Any, *, chat: bool) -> Fields:
        llama = self.name == "llama.cpp"
        if name == "json_schema":
            if llama and not chat:
                return {"json_schema": value}
            schema = {"name": "answer", "strict": True, "schema": value}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if name == "regex" and isinstance(value, Expression):
            plain = {"regex": value.regex}
            return (
                {"grammar": value.gbnf} if llama else plain if self.name == "SGLang" else {"structured_outputs": plain}
            )
        if name == "logit_bias" and llama:
            return {name: [[int(key), bias] for key, bias in value.items()]}
        if name == "logprobs":
            if chat:
                return {"logprobs": True, "top_logprobs": value}
            return {"n_probs": value} if llama else {"logprobs": value}
        return {self.renamed.get(name, name): value}


REALIZAR = Dialect("realizar", "realizar", _OURS)
VLLM = Dialect("vLLM", "vllm", _VLLM)
SGLANG = Dialect("SGLang", "sglang", _VLLM)
LLAMA_CPP = Dialect(
    "llama.cpp",
    "llamacpp",
    _OURS,
    {each.name: each.llama_cpp for each in SAMPLERS if each.llama_cpp},
    # Its default looks at 64 tokens. It takes -1 for all in some versions alone, and keeps a buffer of so many tokens.
    {"repeat_last_n": 65_536, "dry_penalty_last_n": 65_536},
)
OPENAI = Dialect("OpenAI", "", _OPENAI)
_DIALECTS = (REALIZAR, VLLM, SGLANG, LLAMA_CPP)


def find_dialect(owner: str) -> Dialect:
    """The dialect of the server whose models are owned so; OpenAI's fields alone where it is not known."""
    return next((dialect for dialect in _DIALECTS if dialect.owner == owner.lower()), OPENAI)


def make_body(model: str, prompt: str | list[int], max_tokens: int, fields: Fields, *, chat: bool) -> bytes:
    """The JSON of a streamed request, with fields of `translate`. A prompt of token ids is a completion's."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({"model": model, **asked, "max_tokens": max_tokens, **stream, **fields}).encode()


def _is_neutral(name: str, value: Any) -> bool:
    return (name in NEUTRAL and NEUTRAL[name] == value) or name == "ignore_eos"

"""Bodies of requests: every field of every record, within its meaning and beyond it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import inspect as kinds

from fuzz import grammars, values
from realizar.server.app import DIALECTS

RECORDS: dict[str, type[msgspec.Struct]] = {
    route.path: route.body
    for dialect in DIALECTS
    for route in dialect.routes
    if route.body is not None and route.method == "POST"
}
"""Of every route that takes a body."""
_FIELDS = {
    path: {field.encode_name: field.type for field in kinds.type_info(record).fields}  # type: ignore[attr-defined]
    for path, record in RECORDS.items()
}
_WEIGHTS = {
    "/v1/chat/completions": 20,
    "/v1/completions": 16,
    "/v1/responses": 10,
    "/v1/messages": 10,
    "/api/chat": 8,
    "/api/generate": 8,
    "/v1/embeddings": 3,
    "/v1/rerank": 3,
    "/v1/score": 3,
}  # of the others 1
_MOST_TOKENS = 12  # of most answers: a run is to try many requests
_STRUCTURED = frozenset(
    {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format", "structured_outputs"}
)

# Values within their meaning, of the fields that sampling knows.
_SOUND: dict[str, tuple[Any, ...]] = {
    "n": (1, 1, 2, 3, 20),  # a few of the last one fill the queue
    "best_of": (None,),
    "seed": (0, 1, 7, -5, 2**63),
    "stop": ("a", ["e", "\n"], ["river", "stone"]),
    "temperature": (0, 0.1, 0.8, 1, 2),
    "top_p": (0.1, 0.9, 1),
    "presence_penalty": (-2, 0, 1.5),
    "frequency_penalty": (-2, 0, 1.5),
    "logit_bias": ({"5": 10}, {"0": -100, "9": 3.5}),
    "top_k": (0, 1, 40),
    "min_p": (0, 0.05, 1),
    "typical_p": (0.2, 1),
    "top_n_sigma": (0, 1),
    "xtc_probability": (0, 0.5, 1),
    "xtc_threshold": (0.1, 0.5),
    "dry_multiplier": (0, 0.8),
    "dry_base": (1, 1.75),
    "dry_allowed_length": (1, 3),
    "dry_penalty_last_n": (-1, 0, 64),
    "dry_sequence_breakers": ([], ["\n"], ["a", "b", "c"]),
    "mirostat": (0, 2),
    "mirostat_tau": (0.5, 5),
    "mirostat_eta": (0, 0.1),
    "repetition_penalty": (0.5, 1, 1.3),
    "min_tokens": (0, 1, 4),
    "stop_token_ids": ([], [0], list(range(64))),
    "ignore_eos": (True, False),
    "prompt_logprobs": (None, 0, 2),
    "echo": (True, False),
    "stream": (True, True, False),
    "priority": (0, 1, -1),
    "cache_salt": (None, "x", "y"),
    "user": ("u",),
    "keep_alive": (0, 0, 1, "5m", -1),
    "top_n": (0, 1, 3),
    "think": (True, False),
    "raw": (True, False),
    "stop_sequences": (["e"], ["river", "stone"]),
}
_TEMPLATES = (
    "{% for message in messages %}{{ message.content }}{% endfor %}",
    "{{ 9**9**9 }}",
    "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ messages.__class__.__mro__ }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ messages | tojson | upper }}" * 3000,
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
)


def make_request(rng: Random, vocab_size: int, models: Sequence[str]) -> tuple[str, bytes]:
    """A path and a body, as JSON (Python's, with NaN and Infinity) or nearly so, for one of the models."""
    path = rng.choices(list(RECORDS), [_WEIGHTS.get(path, 1) for path in RECORDS])[0]
    body = _base(rng, path)
    if "model" in _FIELDS[path]:
        body["model"] = rng.choice(models) if rng.random() < 0.98 else values.text(rng)[:50]
    for name in rng.sample(sorted(_SOUND), rng.choice((0, 1, 2, 5))):
        if name in _FIELDS[path]:
            body[name] = rng.choice(_SOUND[name])
    beyond = sorted(set(_FIELDS[path]) - {"model"})
    for name in rng.sample(beyond, min(len(beyond), rng.choice((0, 0, 1, 1, 2, 4)))):
        body[name] = _hostile(rng, name, _FIELDS[path][name], vocab_size)
    if "guided_json" in _FIELDS[path] and rng.random() < 0.25:
        name, value = grammars.structured(rng)
        body[name] = value
    if "tools" in _FIELDS[path] and rng.random() < 0.1:
        body |= {"tools": _tools(rng, path), "tool_choice": rng.choice(("auto", "required", "none", "x"))}
    if "stop_token_ids" in _FIELDS[path] and rng.random() < 0.02:
        body |= {"stop_token_ids": list(range(vocab_size)), "min_tokens": 1}
    if rng.random() < 0.03:
        body[values.text(rng)[:30]] = values.anything(rng)
    return path, _encoded(rng, body)


def _base(rng: Random, path: str) -> dict[str, Any]:
    """The fields that a request needs; its answer is short, except for one in fifty."""
    words = values.text(rng) if rng.random() < 0.3 else " ".join(rng.choices(values.WORDS, k=rng.randrange(1, 40)))
    texts = rng.choice((words, [words, words[::-1]]))
    if path.endswith("/rerank"):
        return {"query": words, "documents": [words[::-1], *words.split(" ")[:9]]}
    plain: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": rng.choice((texts, [1, 2, 3]))},
        "/api/embed": {"input": texts},
        "/api/embeddings": {"prompt": words},
        "/v1/score": {"text_1": texts, "text_2": texts},
        "/score": {"text_1": words, "text_2": texts},
        "/tokenize": {"prompt": words},
        "/detokenize": {"tokens": [rng.randrange(400) for _ in range(rng.randrange(20))]},
        "/v1/responses/input_tokens": {"input": words},
        "/v1/messages/count_tokens": {"messages": _messages(rng, words)},
    }
    return plain.get(path) or _generating(rng, path, words)


def _generating(rng: Random, path: str, words: str) -> dict[str, Any]:
    """The fields of a request for text. Those that are refused take any."""
    most = 300 if rng.random() < 0.02 else rng.randrange(1, _MOST_TOKENS)
    stream = rng.random() < 0.5
    if path == "/v1/responses":
        given = words if rng.random() < 0.3 else _items(rng, words)
        return {"max_output_tokens": most, "stream": stream, "input": given}
    if path.startswith("/api/"):
        asked = {"prompt": words} if path == "/api/generate" else {"messages": _messages(rng, words)}
        empty = rng.random() < 0.1  # asks for the model to be loaded, or unloaded
        options = {"num_predict": most, "temperature": rng.choice((0, 1, 2))}
        return {"stream": stream, **({} if empty else asked), "options": options}
    body: dict[str, Any] = {"max_tokens": most, "stream": stream}
    if path == "/v1/completions":
        return body | {"prompt": rng.choice((words, [words], [5, 6, 7], [[5, 6], [7]]))}
    return body | {"messages": _messages(rng, words)}


def _messages(rng: Random, words: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": words}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": values.text(rng)})
    if rng.random() < 0.2:
        messages += [{"role": "assistant", "content": values.text(rng)}, {"role": "user", "content": "go on"}]
    if rng.random() < 0.1:
        odd = {"role": values.text(rng)[:12], "content": values.anything(rng, 2), "name": values.anything(rng, 1)}
        messages.append({key: odd[key] for key in rng.sample(sorted(odd), 2)})
    return messages


def _items(rng: Random, words: str) -> list[dict[str, Any]]:
    """Items of the Responses API, in any order: outputs without their calls are among them."""
    known: list[dict[str, Any]] = [
        {"role": "user", "content": words},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]},
        {"role": "developer", "content": values.text(rng)},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": values.text(rng)}]},
        {"type": "reasoning", "summary": [], "encrypted_content": values.text(rng)},
        {"type": "function_call", "call_id": "c", "name": "f0", "arguments": values.text(rng)},
        {"type": "function_call_output", "call_id": "c", "output": values.text(rng)},
    ]
    items = [known[0], *rng.choices(known, k=rng.choice((0, 1, 2, 5)))]
    if rng.random() < 0.2:
        odd = rng.choice(items)
        items.append({**odd, rng.choice(sorted(odd)): values.anything(rng, 2)})
    return items


def _tools(rng: Random, path: str) -> list[Any]:
    def tool(place: int) -> Any:
        function = {"name": rng.choice((f"f{place}", values.text(rng)[:80])), "parameters": grammars.schema(rng)}
        if path == "/v1/responses":
            return {"type": "function", **function}
        return {"type": "function", "function": function}

    return [tool(place) for place in range(rng.choice((1, 2, 20)))]


def _hostile(rng: Random, name: str, kind: Any, vocab_size: int) -> Any:
    """A value beyond a field's meaning: of its type in three of four cases."""
    if name in _STRUCTURED:
        return grammars.structured(rng)[1]
    if name in ("stop_token_ids", "tokens") and rng.random() < 0.5:
        return rng.choice((list(range(vocab_size)), [-1], [vocab_size], [2**63], [True]))
    if name == "logit_bias" and rng.random() < 0.5:
        return rng.choice(({str(id_): -100 for id_ in range(vocab_size)}, {str(vocab_size): 1}, {"-1": 1}, {"x": 1}))
    if name == "chat_template":
        return rng.choice(_TEMPLATES)
    if name == "min_tokens":
        return rng.choice((1, 5, 2**40))
    if name == "stop" and rng.random() < 0.3:
        return ["a"] * 5000
    return _of_type(rng, kind) if rng.random() < 0.75 else values.anything(rng)


def _of_type(rng: Random, kind: Any) -> Any:
    if isinstance(kind, kinds.UnionType):
        return _of_type(rng, rng.choice(kind.types))
    if isinstance(kind, kinds.IntType):
        return rng.choice(values.INTEGERS)
    if isinstance(kind, kinds.FloatType):
        return values.number(rng)
    if isinstance(kind, kinds.StrType):
        return values.text(rng)
    if isinstance(kind, kinds.BoolType):
        return rng.random() < 0.5
    if isinstance(kind, kinds.ListType):
        return [_of_type(rng, kind.item_type) for _ in range(rng.choice((0, 1, 3, 200)))]
    if isinstance(kind, kinds.DictType):
        return {str(_of_type(rng, kind.key_type))[:30]: _of_type(rng, kind.value_type) for _ in range(3)}
    if isinstance(kind, kinds.StructType):
        chosen = rng.sample(kind.fields, min(len(kind.fields), rng.choice((1, 2, 5))))
        return {field.encode_name: _of_type(rng, field.type) for field in chosen}
    return None if isinstance(kind, kinds.NoneType) else values.anything(rng)


def _encoded(rng: Random, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    data = text.encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.01:
        return data[: rng.randrange(len(data))]
    if kind < 0.02:
        return b"[" * rng.choice((10, 100_000)) + data
    if kind < 0.03:
        return data[:-1] + b"," + data[1:]  # its keys twice
    if kind < 0.04:
        at = rng.randrange(len(data))
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data

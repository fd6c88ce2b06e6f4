"""`/tokenize`, `/detokenize` and `/tokenizer_info`, for lm-eval's remote tokenizer and vLLM's clients."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from realizar.server.api import Api, compute
from realizar.server.errors import about, refused, unsupported
from realizar.server.generation.chat_plan import template_variables
from realizar.server.generation.conversation import text_of
from realizar.server.generation.tools import shown_tools
from realizar.server.http.body import read_record
from realizar.server.models.models import model_of
from realizar.server.openai.conversation import continues_last
from realizar.server.openai.messages import check_messages
from realizar.server.openai.records.tokenize import DetokenizeRequest, TokenizeRequest
from realizar.server.openai.tools import check_tools

MAX_BYTES = 1 << 19
"""Limit of a text in UTF-8, unless the context needs more. Tokenizing takes about a hundred times as much memory."""
_BYTES_PER_TOKEN = 8


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text, or of messages as the chat template renders them."""
    record = await read_record(request, TokenizeRequest)
    api = await model_of(request, record.model)
    if (record.prompt is None) == (record.messages is None):
        raise refused("the request needs either prompt or messages", "prompt", "missing_required_parameter")
    answer = await compute(request, lambda _: _tokenized(api, record))
    return Response(answer, media_type="application/json")


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids, with control tokens spelled out."""
    record = await read_record(request, DetokenizeRequest)
    api = await model_of(request, record.model)
    with about("tokens"):
        text = await compute(request, lambda _: api.model.tokenizer.decode(record.tokens, skip_special=False))
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """Answer with the facts that a client needs to render prompts and count tokens by itself."""
    model = (await model_of(request, request.query_params.get("model"))).model
    answer: dict[str, Any] = {
        "tokenizer_class": type(model.tokenizer).__name__,
        "vocab_size": model.tokenizer.vocab_size,
        "model_max_length": model.context_length,
        "add_bos_token": model.tokenizer.add_bos,
        "add_eos_token": model.tokenizer.add_eos,
        "chat_template": None if model.template is None else model.template.source(),
        **model.tokenizer.special_texts,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _tokenized(api: Api, record: TokenizeRequest) -> bytes:
    """Make and encode the answer here, on the worker thread, since it may have a million tokens."""
    tokens = _tokens(api, record)
    texts = [api.model.tokenizer.token_text(token_id) for token_id in tokens] if record.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": api.max_model_len, "tokens": tokens, "token_strs": texts}
    return msgspec.json.encode(answer)


def _tokens(api: Api, record: TokenizeRequest) -> list[int]:
    # Longer texts than the context are allowed, so that clients can count them.
    messages = check_messages(record.messages) if record.messages is not None else []
    text = record.prompt if record.prompt is not None else text_of(messages)
    size = len(text.encode("utf-8", "surrogatepass"))
    most = max(MAX_BYTES, _BYTES_PER_TOKEN * api.max_model_len)
    if size > most:
        param = "messages" if messages else "prompt"
        raise refused(f"{param} has {size} bytes; at most {most} are tokenized at once", param, "string_too_long")
    if record.prompt is not None:
        with about("prompt"):
            return api.model.tokenizer.encode(record.prompt, add_special=record.add_special_tokens is not False)
    if api.model.template is None:
        raise refused("the model has no chat template; give a prompt", "messages", "no_chat_template")
    variables = template_variables(record.chat_template_kwargs)
    if record.add_special_tokens:
        raise unsupported("add_special_tokens", "must be false: the chat template writes special tokens")
    tools = shown_tools(check_tools(record.tools))
    continues = continues_last(record, messages[-1])
    with about("messages"):
        if continues:
            return api.model.template.encode_unfinished(messages, tools, **variables)
        return api.model.template.encode(messages, tools, record.add_generation_prompt is not False, **variables)

"""Records of Ollama's API. The contents of messages and tools are checked at their use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from realizar.sampling_params import SAMPLERS
from realizar.server.generation.objects import table_record

_OF_LOADING = {
    **dict.fromkeys(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), int),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "logits_all", "vocab_only"), bool),
    **dict.fromkeys(("use_mmap", "use_mlock", "embedding_only"), bool),
}
"""Options that say how a model is loaded. They have no effect: the command that serves it says so."""

if TYPE_CHECKING:
    TableOptions: TypeAlias = msgspec.Struct
else:
    _KINDS = {each.ollama: each.kind for each in SAMPLERS if each.ollama} | _OF_LOADING
    TableOptions = table_record("TableOptions", {name: kind | None for name, kind in _KINDS.items()})


class Options(TableOptions, kw_only=True, forbid_unknown_fields=True):
    """Options of one request. Those of how a model is loaded, such as `num_ctx`, have no effect.

    Attributes:
        num_predict: tokens to generate; 0, -1 and -2 are the rest of the context.
        top_p: 0 leaves the most probable token, as `top_k` of 1 does.
        repeat_last_n: tokens that penalties look back at: -1 for all, 0 for none; 64 is as if it were left out.
    """

    tfs_z: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None


class AnswerRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that `/api/chat` and `/api/generate` share.

    Attributes:
        stream: null is true.
        format: `json`, or a JSON schema.
        think: true, false, or an effort.
        keep_alive: a duration, as `read_keep_alive` reads it.
        truncate, shift: without effect, as clients send their defaults: a prompt that does not fit is refused, and an
            answer ends where the context ends, with the reason `length`.
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    template: str | None = None
    truncate: bool | None = None
    shift: bool | None = None


class ChatRequest(AnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/chat`. Without messages it asks for the model to be loaded."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(AnswerRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/generate`. Without a prompt and a suffix it asks for the model to be loaded.

    Attributes:
        suffix: the text after the answer.
        raw: true to go on with the prompt, without the chat template.
        context: ids of earlier exchanges, as an answer gave them.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/show`. `name` is the old name of `model`; `verbose` shows nothing more here."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class EmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/embed`.

    Attributes:
        truncate: null and true cut texts that are longer than the context to their beginning.
        dimensions: must be the model's own.
        options: without effect.
    """

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/embeddings`, which cuts a text as `/api/embed` does."""

    model: str
    prompt: str | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class PullRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/api/pull`. `name` is the old name of `model`; the others have no effect."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None
    username: str | None = None
    password: str | None = None

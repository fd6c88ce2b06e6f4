"""`LLM`: a model in this process, for scripts, notebooks and the command line."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from realizar.backends.base import Capacity
from realizar.backends.devices import ChosenDevice
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.clients.engine_client import EngineClient, RequestStream
from realizar.engine.clients.prompt_progress import ProgressReporter, PromptProgress
from realizar.engine.llm_options import with_options
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import InvalidRequestError, QueueFullError
from realizar.hub.progress import Progress, ignore_progress
from realizar.models.spec import ModelSpec
from realizar.outputs import RequestOutput, TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.scheduler.policy import Policy
from realizar.tokenizer.generation_defaults import default_sampling
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.parsers.choose import AnswerFormat, find_format
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.templates.chat_messages import Message
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int]"
Conversation: TypeAlias = "Sequence[Message]"


class LLM:
    """A loaded model with its tokenizer. Threads may share it. Call `close`, or use it as a context manager.

    Args:
        model: a path, a pulled name (`smollm2:135m`), a Hugging Face name (`user/repo:Q4_K_M`), or an open checkpoint.
        config: how to run it.
        chat_template: text of a Jinja template to use in place of the model's own.
        fetch_progress: callback for downloads.
        load_progress: callback for loading, with the name of the running stage and the share that is done, 0 to 1.
        options: fields of `EngineConfig` by name, over `config`; vLLM's `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `num_speculative_tokens` and `enable_prefix_caching` are known too.

    Raises:
        TypeError: an option is unknown; the error names the nearest.
        HubError: the model can't be found or fetched.
        CheckpointError: the file is malformed.
        UnsupportedModelError, TokenizerError: the model can't run here.
        CapacityError: the model does not fit into memory.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        *,
        config: EngineConfig | None = None,
        chat_template: str | None = None,
        fetch_progress: Progress = ignore_progress,
        load_progress: Callable[[str, float], None] | None = None,
        **options: Any,
    ) -> None:
        self._config = with_options(config, options, ("config", "chat_template", "fetch_progress", "load_progress"))
        self._chat_template = chat_template
        self._checkpoint = model if isinstance(model, Checkpoint) else find_checkpoint(model, fetch_progress)
        self._tokenizer = load_tokenizer(self._checkpoint)
        self._default_sampling = default_sampling(self._checkpoint)
        core = load_core(
            self._checkpoint,
            self._config,
            policy=Policy(stretch=math.inf),
            progress=load_progress,
            tokenizer=self._tokenizer,
        )
        self._spec, self._capacity, self._device = core.spec, core.capacity, core.device
        self._max_request_tokens = core.max_request_tokens
        self._client = EngineClient(core, self._new_text, self._tokenizer.eos_ids)

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def capacity(self) -> Capacity:
        """The capacity of the loaded backend."""
        return self._capacity

    @property
    def device(self) -> ChosenDevice:
        """The device that runs the model."""
        return self._device

    @property
    def max_request_tokens(self) -> int:
        """Maximum of prompt and output tokens of a request: the context, or less if the KV cache is smaller."""
        return self._max_request_tokens

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling of requests that bring no parameters: the files' advice, then temperature 0.8, top_k 40, top_p 0.95,
        min_p 0.05. Use `dataclasses.replace` to change some of it; `SamplingParams()` by itself is neutral.
        """
        return self._default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: PromptProgress | bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; the results have the order of the prompts. Surplus prompts wait for room.

        Args:
            prompts: a text, token ids, or a sequence of texts or token ids.
            sampling_params: one for all prompts, or a sequence with one for each; None takes `default_sampling`.
            progress: callback with the number of finished prompts and of all. True writes a line to stderr, False
                writes nothing; None writes a line if stderr is a terminal and there are several prompts.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: a prompt can't run, or the numbers of parameters
                and prompts differ. Then no prompt is answered.
            EngineDeadError: the engine stopped.
        """
        return self._run_all([self._tokens_of(prompt) for prompt in _listed(prompts)], sampling_params, progress)

    def generate_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Complete one prompt as a stream: iterate the deltas, then read `result`. Errors are those of `generate`."""
        text, token_ids = self._tokens_of(prompt)
        return self._client.submit(token_ids, self._sampling_of_each(sampling_params, 1)[0], prompt=text)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: PromptProgress | bool | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations in one batch through the model's own chat template; the results keep their order.

        Args:
            messages: a conversation, or a sequence of conversations: messages in the format of OpenAI's API.
            sampling_params, progress: as of `generate`.
            tools: function descriptions in the format of OpenAI's API.
            variables: other variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses or fails.
            InvalidRequestError, ContextLengthError, CapacityError: a conversation can't run; none is then
                answered.
            EngineDeadError: the engine stopped.
        """
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        prompts = [(None, self.chat_tokens(each, tools=tools, **variables)) for each in conversations]
        return self._run_all(prompts, sampling_params, progress)

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> RequestStream:
        """Answer one conversation as a stream: iterate the deltas, then read `result`. Errors are those of `chat`."""
        token_ids = self.chat_tokens(messages, tools=tools, **variables)
        return self._client.submit(token_ids, self._sampling_of_each(sampling_params, 1)[0])

    def chat_tokens(
        self, messages: Conversation, *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of the prompt that `chat` builds from a conversation.

        Raises:
            ChatTemplateError, InvalidRequestError: as of `chat`.
        """
        return self._template.encode(messages, tools, **variables)

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's answers to chat prompts: the style of its calls, and where its reasoning stands.

        Raises:
            ChatTemplateError: the model has no template.
        """
        return find_format(self._template.source())

    def score(self, prompt: Prompt, top_n: int = 0) -> list[TokenLogprobs | None]:
        """Log-probabilities of a text: entry i is of token i given the tokens before it; the first entry is None.

        Args:
            top_n: number of most probable ids to return at each position.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: the text can't be scored.
            EngineDeadError: the engine stopped.
        """
        text, token_ids = self._tokens_of(prompt)
        sampling = SamplingParams(prompt_logprobs=top_n)
        with self._client.submit(token_ids, sampling, prompt=text, score_only=True, keep_deltas=False) as stream:
            return list(stream.result().prompt_logprobs or ())

    def close(self) -> None:
        """Free the weights; open and later requests get EngineDeadError. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_all(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: PromptProgress | bool | None,
    ) -> list[RequestOutput]:
        wanted = self._sampling_of_each(sampling_params, len(prompts))
        with ExitStack() as open_streams:
            streams: list[RequestStream] = []
            reporter = ProgressReporter(progress, streams, len(prompts))
            for (text, ids), sampling in zip(prompts, wanted, strict=True):
                streams.append(open_streams.enter_context(self._submit_in_turn(text, ids, sampling, reporter)))
            for stream in streams:
                while not stream.done:
                    self._client.drive(stream, until_done=True)
                    reporter.step()
            reporter.end()
            return [stream.result() for stream in streams]

    def _submit_in_turn(
        self, text: str | None, token_ids: list[int], sampling: SamplingParams, reporter: ProgressReporter
    ) -> RequestStream:
        """Queue a prompt; if the limit of open requests or grammars is reached, wait until one of them has ended.

        Raises:
            QueueFullError: it has no room though nothing is open.
        """
        while True:
            try:
                return self._client.submit(token_ids, sampling, prompt=text, keep_deltas=False)
            except QueueFullError:
                if not self._client.wait_for_an_end(reporter.step):
                    raise

    def _sampling_of_each(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """Parameters of each prompt.

        Raises:
            InvalidRequestError: the numbers of parameters and prompts differ, or a value is not `SamplingParams`.
        """
        if given is None or isinstance(given, SamplingParams):
            return [given or self._default_sampling] * count
        several: Any = given  # callers need not check types
        listed: list[Any] = list(several) if isinstance(several, Sequence) else [several]
        for each in listed:
            if not isinstance(each, SamplingParams):
                found = type(each).__name__
                raise InvalidRequestError(f"sampling_params must be SamplingParams, not {found}", "sampling_params")
        if len(listed) != count:
            raise InvalidRequestError(
                f"{len(listed)} sampling parameters were given for {count} prompts: give one for all, or one for each",
                "sampling_params",
            )
        return listed

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._chat_template)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        return None, [_token_id(token_id) for token_id in prompt]

    def _new_text(self, sampling: SamplingParams) -> StopChecker:
        return StopChecker(self._tokenizer, sampling)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; a sequence that starts with a number is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(f"a prompt must be text or token ids, not {type(prompts).__name__}", "prompt")
    items: list[Any] = list(prompts)
    return [items] if items and not isinstance(items[0], str | Sequence) else items


def _token_id(value: Any) -> int:
    try:
        return int(value.__index__())
    except AttributeError:
        raise InvalidRequestError(f"a prompt must be text or token ids, not {type(value).__name__}", "prompt") from None

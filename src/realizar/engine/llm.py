"""`LLM`: a model in this process, for scripts, notebooks and the command line."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Capacity
from realizar.backends.devices import ChosenDevice
from realizar.backends.load_progress import LoadProgress
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import InlineLink
from realizar.engine.frontend.engine_thread import EngineThread, RequestStream
from realizar.engine.frontend.outputs import RequestOutput
from realizar.engine.frontend.prompt_progress import PromptProgress, wanted_progress
from realizar.engine.llm_options import with_options
from realizar.engine.llm_prompts import Conversation, Prompt, PromptReader, PromptTokens, Samplings, Tools, unit_vectors
from realizar.engine.llm_requests import ModelRequests
from realizar.engine.loading import find_checkpoint, load_core
from realizar.hub.progress import Progress, ignore_progress
from realizar.models.spec import ModelSpec
from realizar.outputs import TokenLogprobs
from realizar.request import Pooling
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from realizar.tokenizer.parsers.choose import AnswerFormat
from realizar.tokenizer.tokenizer import Tokenizer


class LLM:
    """A loaded model with its tokenizer. Threads may share it. Call `close`, or use it as a context manager.

    Args:
        model: a path, a pulled name (`smollm2:135m`), a Hugging Face name (`user/repo:Q4_K_M`), or an open checkpoint.
        chat_template: text of a Jinja template to use in place of the model's own.
        fetch_progress: callback for downloads.
        load_progress: callback for loading, with the name of the running stage and the share that is done, 0 to 1.
        options: fields of `EngineConfig` by name, over `config`. vLLM's names are known too: `max_model_len`,
            `max_num_seqs`, `max_num_batched_tokens`, `num_speculative_tokens`, `enable_prefix_caching` and
            `enforce_eager` work, and the error for others says what to use.

    Attributes:
        max_request_tokens: maximum of prompt and output tokens of a request: the context, or less if the KV cache is
            smaller.
        drafter: who drafts, as of `EngineConfig`; for `auto` the path of a file beside the model, if that does.
        default_sampling: sampling of requests that bring no parameters: the files' advice, then temperature 0.8, top_k
            40, top_p 0.95, min_p 0.05. Use `dataclasses.replace` to change some of it; `SamplingParams()` by itself is
            neutral.

    Raises:
        TypeError: an option is unknown; the error names the nearest.
        InvalidRequestError: an option's value is out of range, or asks for what only vLLM has.
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
        load_progress: LoadProgress | None = None,
        **options: Any,
    ) -> None:
        wanted = with_options(config, options, ("config", "chat_template", "fetch_progress", "load_progress"))
        self.checkpoint = (
            model if isinstance(model, Checkpoint) else find_checkpoint(model, fetch_progress, mmproj=wanted.mmproj)
        )
        self._reader = PromptReader(self.checkpoint, chat_template, wanted)
        self.tokenizer: Tokenizer = self._reader.tokenizer
        self.default_sampling: SamplingParams = self._reader.default_sampling
        policy = Policy(stretch=math.inf)
        core = load_core(self.checkpoint, wanted, policy=policy, progress=load_progress, tokenizer=self.tokenizer)
        self.spec: ModelSpec = core.spec
        self.capacity: Capacity = core.capacity
        self.device: ChosenDevice = core.config.chosen
        self.drafter: str = core.config.drafter
        self.max_request_tokens: int = core.scheduler.max_request_tokens
        engine = AsyncEngine(
            InlineLink(core),
            self._reader.new_text,
            self.tokenizer.eos_ids,
            max_queued=sys.maxsize,  # only the engine's own limit counts
            keeps_logprobs=True,
        )
        self._thread = EngineThread(engine)
        self._requests = ModelRequests(self._reader, engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Samplings = None,
        *,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts in one batch; the results have the order of the prompts. Surplus prompts wait for room.

        Args:
            prompts: a text, token ids, `{"prompt_embeds": embeddings}` (see `EmbedsPrompt`), or a sequence of these.
            sampling_params: one for all prompts, or a sequence with one for each; None takes `default_sampling`.
            progress: callback with the number of finished prompts and of all. True writes a line to stderr, False
                writes nothing; None writes a line if stderr is a terminal and there are several prompts.
            use_tqdm: vLLM's name for True and False of `progress`.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: a prompt can't run, or the numbers of parameters
                and prompts differ. Then no prompt is answered.
            EngineDeadError: the engine stopped.
        """
        return self._run_all(self._reader.prompts(prompts), sampling_params, wanted_progress(progress, use_tqdm))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Complete one prompt as a stream: iterate the deltas, then read `result`. Errors are those of `generate`."""
        return self._stream(self._reader.prompt(prompt), sampling_params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Samplings = None,
        *,
        tools: Tools = None,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations in one batch through the model's own chat template; the results keep their order.

        Args:
            messages: a conversation, or a sequence of conversations: messages in the format of OpenAI's API; images as
                `given_images` takes them.
            sampling_params, progress, use_tqdm: as of `generate`.
            tools: function descriptions in the format of OpenAI's API.
            variables: other variables of the template, such as `enable_thinking`; vLLM's `chat_template_kwargs` is
                a dictionary of such variables, and its `mm_processor_kwargs`, no variable, bounds pixels of images.

        Raises:
            ChatTemplateError: the model has no template, or the template refuses or fails.
            InvalidRequestError, ContextLengthError, CapacityError: a conversation can't run; none is then
                answered.
            EngineDeadError: the engine stopped.
        """
        prompts = self._reader.chats(messages, tools, variables, self.max_request_tokens)
        return self._run_all(prompts, sampling_params, wanted_progress(progress, use_tqdm))

    def chat_stream(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Tools = None,
        **variables: Any,
    ) -> RequestStream:
        """Answer one conversation as a stream: iterate the deltas, then read `result`. Errors are those of `chat`."""
        prompt = self._reader.chat(messages, tools, variables, self.max_request_tokens)
        return self._stream(prompt, sampling_params)

    def chat_tokens(self, messages: Conversation, *, tools: Tools = None, **variables: Any) -> list[int]:
        """Token ids of the prompt that `chat` builds from a conversation, of any length; no image is decoded.

        ChatTemplateError, InvalidRequestError: as of `chat`.
        """
        return self._reader.plan_chat(messages, tools, variables).token_ids

    @property
    def answer_format(self) -> AnswerFormat:
        """The format of the model's answers to chat prompts: the style of its calls, and where its reasoning stands.

        It raises ChatTemplateError if the model has no template.
        """
        return self._reader.answer_format

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        progress: PromptProgress | bool | None = None,
        use_tqdm: bool | None = None,
    ) -> NDArray[np.float32]:
        """Embed prompts in one batch.

        Args:
            prompts, progress, use_tqdm: as of `generate`.
            pooling: `mean` over the prompt's tokens, or its `last`; None is the one that the model was made for.

        Returns:
            Vectors of unit length, float32 [prompts, hidden_size].

        Raises:
            InvalidRequestError: the model was not made for embeddings and `pooling` is None; or a prompt can't run, as
                of `generate`.
            ContextLengthError, CapacityError, EngineDeadError: as of `generate`.
        """
        found = self._reader.prompts(prompts)
        wanted, shown = self._reader.pooling(pooling), wanted_progress(progress, use_tqdm)
        outputs = self._run_all(found, SamplingParams(), shown, pooling=wanted)
        return unit_vectors([output.pooled for output in outputs], self.spec.hidden_size)

    def score(self, prompt: Prompt, top_n: int = 0) -> list[TokenLogprobs | None]:
        """Log-probabilities of a text: entry i is of token i given the tokens before it; the first entry is None.

        Args:
            top_n: number of most probable ids to return at each position.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: the text can't be scored.
            EngineDeadError: the engine stopped.
        """
        found = self._reader.prompt(prompt)
        sampling = SamplingParams(prompt_logprobs=top_n)
        outputs = self._run_all([found], sampling, progress=False, score_only=True)
        return list(outputs[0].prompt_logprobs or ())

    def close(self) -> None:
        """Free the weights; open and later requests get EngineDeadError. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name, place = self.checkpoint.path.name, self.device.label
        state = ", closed" if self._thread.closed else ""
        return f"LLM({name!r}, device={place!r}, context_length={self.max_request_tokens}{state})"

    def _stream(self, prompt: PromptTokens, sampling: SamplingParams | None) -> RequestStream:
        return self._thread.stream(self._requests.stream(prompt, sampling))

    def _run_all(
        self,
        prompts: Sequence[PromptTokens],
        sampling_params: Samplings,
        progress: PromptProgress | bool | None,
        **kinds: Any,
    ) -> list[RequestOutput]:
        """Run prompts; a callback for progress is called here, on the caller's thread."""
        if not callable(progress):
            return self._thread.run(self._requests.run_all(prompts, sampling_params, progress, **kinds))
        reports: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        work = self._thread.start(
            self._requests.run_all(prompts, sampling_params, lambda *counts: reports.put(counts), **kinds)
        )
        work.add_done_callback(lambda _: reports.put(None))
        try:
            while counts := reports.get():
                progress(*counts)
            return work.result()
        finally:
            work.cancel()
            del work  # which has the error, whose traceback has this frame

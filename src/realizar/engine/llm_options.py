"""Keyword arguments of `LLM` become an `EngineConfig`: its fields, or vLLM's names for some of them.

vLLM's other names are known too: a value that asks for nothing passes, and any other is refused with what to use.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError

VLLM_NAMES: Mapping[str, str] = {
    "max_model_len": "context_length",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "num_speculative_tokens": "speculative_tokens",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}
"""vLLM's names of fields; `realizar serve` takes them as options too."""

_EAGER = "enforce_eager"


class Advice(NamedTuple):
    """The answer `text` to an argument of vLLM that has no field: what to use in its place, or why there is nothing.

    Values of `neutral`, and None, ask for nothing.
    """

    neutral: tuple[Any, ...]
    text: str


_ONE_DEVICE = Advice((1,), "a model runs on one device")
_MEMORY = "kv_cache_bytes= sets the memory of the KV cache in bytes; by default a GPU's free memory is used"
_BY_FILES = "the model's files say it; leave it out"
VLLM_ADVICE: Mapping[str, Advice] = {
    "tensor_parallel_size": Advice((1,), "tensor_parallel= has processes compute a model together"),
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "enable_expert_parallel": Advice((False,), _ONE_DEVICE.text),
    "distributed_executor_backend": Advice((), _ONE_DEVICE.text),
    "disable_custom_all_reduce": Advice((False, True), _ONE_DEVICE.text),
    "gpu_memory_utilization": Advice((), _MEMORY),
    "num_gpu_blocks_override": Advice((), _MEMORY),
    "dtype": Advice(("auto",), "weights stay as the files store them; kv_cache_dtype= is for the KV cache"),
    "quantization": Advice((), _BY_FILES),
    "load_format": Advice(("auto",), _BY_FILES),
    "config_format": Advice(("auto",), _BY_FILES),
    "trust_remote_code": Advice((False,), "no code of a repository is ever run; leave it out"),
    "seed": Advice((), "SamplingParams(seed=) sets it for each request"),
    "swap_space": Advice((0,), "requests that lack room are computed again later; nothing is swapped"),
    "cpu_offload_gb": Advice((0,), "all weights lie on one device"),
    "tokenizer": Advice((), "the model's own tokenizer is used"),
    "tokenizer_mode": Advice(("auto",), "the model's own tokenizer is used"),
    "skip_tokenizer_init": Advice((False,), "the tokenizer is always loaded; prompts may be token ids"),
    "revision": Advice((), "write it into the model's name: user/repo@revision"),
    "tokenizer_revision": Advice((), "write it into the model's name: user/repo@revision"),
    "download_dir": Advice((), "the variable HF_HOME says where models of Hugging Face lie"),
    "hf_token": Advice((), "the variable HF_TOKEN has it"),
    "hf_overrides": Advice(({},), _BY_FILES),
    "max_logprobs": Advice((), "requests may ask for any number; leave it out"),
    "max_seq_len_to_capture": Advice((), "graphs=False turns graphs off"),
    "compilation_config": Advice((), "graphs=False turns graphs off"),
    "enable_chunked_prefill": Advice((True,), "prompts are always read in chunks of max_step_tokens"),
    "speculative_config": Advice((), "drafter= names a model that drafts, and speculative_tokens= says how much"),
    "disable_log_stats": Advice((False, True), "nothing is logged"),
    "enable_lora": Advice((False,), "LoRA is not supported"),
    "generation_config": Advice(("auto",), "default_sampling has what the files advise; SamplingParams() is neutral"),
    "override_generation_config": Advice(({},), "SamplingParams sets it for each request"),
    "limit_mm_per_prompt": Advice(({},), "a prompt may have any number of images, and neither audio nor videos"),
    "task": Advice(("auto", "generate", "embed"), "one LLM both generates and embeds"),
    "runner": Advice(("auto", "generate", "pooling"), "one LLM both generates and embeds"),
    "convert": Advice(("auto", "none", "embed"), "one LLM both generates and embeds"),
    "pooler_config": Advice((), "embed(pooling=) sets it for each call"),
    "mm_processor_kwargs": Advice(
        ({},), "chat(mm_processor_kwargs=) sets it for a call, and image_max_tokens= for all"
    ),
    "allowed_local_media_path": Advice(("",), "no file is read that a message names by an address"),
    "allowed_media_domains": Advice((), "nothing is fetched from an address in a message"),
    "logits_processors": Advice(([],), "SamplingParams has logit_bias, penalties and grammars"),
    "structured_outputs_config": Advice((), "SamplingParams(structured=) sets a grammar for each request"),
    "guided_decoding_backend": Advice(("auto",), "SamplingParams(structured=) sets a grammar for each request"),
}
"""Arguments of vLLM's `LLM` without a field."""

_CHAT_ADVICE: Mapping[str, Advice] = {
    "add_generation_prompt": Advice((True,), "the prompt always ends where the answer begins"),
    "continue_final_message": Advice((False,), "generate() goes on with a text"),
    "chat_template": Advice((), "LLM(chat_template=) takes it"),
    "chat_template_content_format": Advice(("auto",), "the template gets texts or parts, whichever it reads"),
    "lora_request": Advice((), "LoRA is not supported"),
}
"""Arguments of vLLM's `LLM.chat` that are no variables of a template."""


def with_options(config: EngineConfig | None, options: Mapping[str, Any], others: tuple[str, ...]) -> EngineConfig:
    """Apply keyword arguments to a configuration; `others` are parameters that are not fields, for suggestions.

    TypeError: a name is unknown (the error names the nearest), or two names mean the same field.
    InvalidRequestError: a value is out of range, or asks for what only vLLM has.
    """
    known = [field.name for field in fields(EngineConfig)]
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name in VLLM_ADVICE:
            _check_neutral(name, value, VLLM_ADVICE[name])
            continue
        field, value = ("graphs", not value) if name == _EAGER else (VLLM_NAMES.get(name, name), value)
        if field not in known:
            near = difflib.get_close_matches(name, [*known, *VLLM_NAMES, *VLLM_ADVICE, _EAGER, *others], 1)
            hint = f"; did you mean {near[0]}?" if near else f"; the options are {', '.join(known)}"
            raise TypeError(f"LLM has no option {name!r}{hint}")
        if field in changes:
            raise TypeError(f"LLM was given {field!r} twice, once as {name!r}")
        changes[field] = value
    return replace(config or EngineConfig(), **changes)


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a chat template among keyword arguments; those in vLLM's `chat_template_kwargs` are added.

    InvalidRequestError: an argument asks for what only vLLM has, or `chat_template_kwargs` is no mapping.
    """
    variables = dict(given)
    nested = variables.pop("chat_template_kwargs", None) or {}
    if not isinstance(nested, Mapping):
        raise InvalidRequestError(
            f"chat_template_kwargs must be a dict of variables, not {type(nested).__name__}", "chat_template_kwargs"
        )
    for name, advice in _CHAT_ADVICE.items():
        if name in variables:
            _check_neutral(name, variables.pop(name), advice)
    return {**variables, **nested}


def _check_neutral(name: str, value: Any, advice: Advice) -> None:
    if value is not None and not any(type(value) is type(each) and value == each for each in advice.neutral):
        raise InvalidRequestError(f"{name}={value!r} is not supported: {advice.text}", name)

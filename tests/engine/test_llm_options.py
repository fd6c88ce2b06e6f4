"""Keyword arguments of `LLM`: fields of the configuration, vLLM's names of them, and what is unknown."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from realizar import LLM
from realizar.cli.options.engine import BatchingOptions, DraftOptions, EngineOptions
from realizar.config import EngineConfig
from realizar.engine.llm_options import VLLM_ADVICE, VLLM_NAMES, template_variables, with_options
from realizar.errors import InvalidRequestError


def test_vllms_names() -> None:
    found = with_options(
        None,
        {"max_model_len": 900, "max_num_seqs": 3, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
        (),
    )
    assert found == EngineConfig(context_length=900, max_running=3, max_step_tokens=64, prefix_cache=False)
    assert with_options(EngineConfig(threads=3), {"num_speculative_tokens": 2}, ()).threads == 3


def test_the_command_knows_the_same_names() -> None:
    texts = [
        str(getattr(options, "__annotations__", {}).get(name))
        for options in (EngineOptions, BatchingOptions, DraftOptions)
        for name in options.__annotations__
    ]
    named = " ".join(texts)
    for name in VLLM_NAMES:
        assert f"--{'no-' if name.startswith('enable') else ''}{name.replace('_', '-')}" in named, name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_runing", "max_running"), ("max_model_length", "max_model_len"), ("chat_templates", "chat_template")],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"LLM has no option '{name}'; did you mean {nearest}\\?"):
        LLM("nonesuch.gguf", **{name: 3})


def test_an_option_like_none_lists_all() -> None:
    with pytest.raises(TypeError, match="the options are tensor_parallel, layers_on, threads, "):
        LLM("nonesuch.gguf", zzz=2)


def test_eager_mode_is_without_graphs() -> None:
    assert with_options(None, {"enforce_eager": True}, ()).graphs is False
    assert with_options(None, {"enforce_eager": False}, ()).graphs is True
    with pytest.raises(TypeError, match="'graphs' twice, once as 'enforce_eager'"):
        with_options(None, {"graphs": True, "enforce_eager": True}, ())


NEUTRAL = {"tensor_parallel_size": 1, "dtype": "auto", "quantization": None, "trust_remote_code": False, "seed": None}


def test_values_of_vllm_that_ask_for_nothing_pass() -> None:
    assert with_options(None, {**NEUTRAL, "swap_space": 0, "disable_log_stats": True}, ()) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("tensor_parallel_size", 2, "tensor_parallel= has processes compute a model together"),
        ("pipeline_parallel_size", True, "a model runs on one device"),
        ("gpu_memory_utilization", 0.9, "kv_cache_bytes="),
        ("dtype", "bfloat16", "kv_cache_dtype="),
        ("quantization", "awq", "the model's files say it"),
        ("trust_remote_code", True, "no code of a repository is ever run"),
        ("seed", 0, r"SamplingParams\(seed=\)"),
        ("swap_space", 4, "nothing is swapped"),
        ("revision", "main", "user/repo@revision"),
        ("hf_overrides", [], "the model's files say it"),
    ],
)
def test_what_only_vllm_has_is_refused_with_what_to_use(name: str, value: object, advice: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name}=.* is not supported: .*{advice}") as caught:
        LLM("nonesuch.gguf", **{name: value})
    assert caught.value.param == name


def test_advice_names_what_there_is() -> None:
    """No name is both a field and advice, and parameters that advice names exist."""
    known = {field.name for field in fields(EngineConfig)}
    assert not set(VLLM_ADVICE) & (known | set(VLLM_NAMES))
    named = {name for advice in VLLM_ADVICE.values() for name in re.findall(r"(?<!\()\b([a-z_]+)=", advice.text)}
    assert named - {"chat_template"} <= known
    assert "kv_cache_bytes" in named


def test_arguments_of_vllms_chat() -> None:
    given = {"enable_thinking": False, "chat_template_kwargs": {"custom": 1}, "add_generation_prompt": True}
    assert template_variables({**given, "lora_request": None}) == {"enable_thinking": False, "custom": 1}
    for name, value in (("continue_final_message", True), ("lora_request", 7), ("chat_template_kwargs", "x")):
        with pytest.raises(InvalidRequestError) as caught:
            template_variables({name: value})
        assert caught.value.param == name


def test_a_field_under_two_names_and_a_value_out_of_range() -> None:
    with pytest.raises(TypeError, match="'context_length' twice, once as 'max_model_len'"):
        LLM("nonesuch.gguf", context_length=100, max_model_len=200)
    with pytest.raises(InvalidRequestError, match="context_length must be at least 1"):
        LLM("nonesuch.gguf", max_model_len=0)

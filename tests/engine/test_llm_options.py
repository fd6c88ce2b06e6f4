"""Keyword arguments of `LLM`: fields of the configuration, vLLM's names of them, and what is unknown."""

from __future__ import annotations

import pytest

from realizar import LLM
from realizar.cli.options.engine import BatchingOptions, EngineOptions
from realizar.config import EngineConfig
from realizar.engine.llm_options import VLLM_NAMES, with_options
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
        for options in (EngineOptions, BatchingOptions)
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
    with pytest.raises(TypeError, match="the options are threads, "):
        LLM("nonesuch.gguf", tensor_parallel_size=2)


def test_a_field_under_two_names_and_a_value_out_of_range() -> None:
    with pytest.raises(TypeError, match="'context_length' twice, once as 'max_model_len'"):
        LLM("nonesuch.gguf", context_length=100, max_model_len=200)
    with pytest.raises(InvalidRequestError, match="context_length must be at least 1"):
        LLM("nonesuch.gguf", max_model_len=0)

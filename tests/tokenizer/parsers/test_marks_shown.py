"""Control tokens that mark calls are text of answers, and no others are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.stop_checker import StopChecker
from tokenizer.parsers.parsed_answers import Answer, parse

TEMPLATE = "{{ tools | tojson }}{{ '[TOOL_CALLS]' }}[ARGS]"
CONTROL = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[INST]"]


def test_marks_reach_the_parser() -> None:
    texts = [*CONTROL, *(chr(code) for code in range(0x21, 0x7F))]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([3] * len(CONTROL) + [1] * (len(texts) - len(CONTROL)), np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    tokenizer = load_tokenizer(Checkpoint(Path("made-up.gguf"), "gguf", metadata, {}))
    assert tokenizer.mark_ids == {"[TOOL_CALLS]": 2, "[ARGS]": 3}
    ids = tokenizer.encode('[INST][TOOL_CALLS]f[ARGS]{"a":1}</s>', add_special=False)
    assert ids[:2] == [4, 2]
    checker = StopChecker(tokenizer, SamplingParams(), tokenizer.eos_ids)
    texts = [checker.add((token_id,)) for token_id in ids]
    assert "".join(texts) == '[TOOL_CALLS]f[ARGS]{"a":1}'
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(choose_parser(find_format(tokenizer.chat_template), tools), texts) == Answer(
        names=["f"], arguments=['{"a":1}']
    )

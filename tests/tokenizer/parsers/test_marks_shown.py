"""Tokens that mark calls are text of answers and no other control tokens are; the same words elsewhere are no marks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.engine.frontend.growing_choice import GrowingChoice
from realizar.sampling_params import SamplingParams
from realizar.server.generation.token_kinds import TokenKinds
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.tokenizer import Tokenizer
from tokenizer.parsers.parsed_answers import Answer, assemble, parse

TEMPLATE = "{{ tools | tojson }}{{ '[TOOL_CALLS]' }}[ARGS]"
CONTROL = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[INST]"]


MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINKING = "{{ tools | tojson }}<think>\n</think><tool_call>"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'


def _tokenizer(template: str, special: list[str], kinds: list[int]) -> Tokenizer:
    """A vocabulary of ASCII, the first bytes of longer characters, and special tokens."""
    texts = [*special, *(chr(code) for code in range(0x21, 0x7F)), "Ġ", "Ċ", "Ã", "©"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([*kinds, *[1] * (len(texts) - len(special))], np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": template,
    }
    return load_tokenizer(Checkpoint(Path("made-up.gguf"), "gguf", metadata, {}))


def test_marks_reach_the_parser() -> None:
    tokenizer = _tokenizer(TEMPLATE, CONTROL, [3] * len(CONTROL))
    assert tokenizer.mark_ids == {"[TOOL_CALLS]": 2, "[ARGS]": 3}
    ids = tokenizer.encode('[INST][TOOL_CALLS]f[ARGS]{"a":1}</s>', add_special=False)
    assert ids[:2] == [4, 2]
    checker = StopChecker(tokenizer, SamplingParams(), tokenizer.eos_ids)
    texts = [checker.add((token_id,)) for token_id in ids]
    assert checker.marks == [0, 13]
    assert "".join(texts) == '[TOOL_CALLS]f[ARGS]{"a":1}'
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(choose_parser(find_format(tokenizer.chat_templates["default"]), tools), texts) == Answer(
        names=["f"], arguments=['{"a":1}']
    )


@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
@pytest.mark.parametrize("stop", [(), ("<END>",), ("call>!",)])
def test_quoted_marks_are_text(kind: int, stop: tuple[str, ...]) -> None:
    """Marks that an answer spells in ordinary tokens end no reasoning and make no call, however the tokens come."""
    tokenizer = _tokenizer(THINKING, ["<s>", "</s>", *MARKS], [3, 3, *[kind] * len(MARKS)])
    assert tokenizer.answer_marks.keys() == set(MARKS)

    def ids_of(*parts: str) -> list[int]:
        """Marks that are parts of their own are tokens, and all else is spelled byte by byte."""
        ids: list[int] = []
        for part in parts:
            spelled = [index for char in part for index in tokenizer.encode(char, add_special=False)]
            ids += [tokenizer.answer_marks[part]] if part in MARKS else spelled
        return ids

    call = ("<tool_call>", '{"name": "f", "arguments": {"a": "</tool_call> <thi"}}', "</tool_call>")
    ids = ids_of(f"Is it é</think> or {CALL}?", "</think>", f"\n\nUse </think>é, not {CALL}: <tool", *call)
    ids.insert(len(ids_of("Is it ")), ids_of("é")[0])  # half a character before another one
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected = Answer(
        f"Use </think>é, not {CALL}: <tool",
        f"Is it \ufffdé</think> or {CALL}?",
        ["f"],
        ['{"a": "</tool_call> <thi"}'],
    )
    rng = random.Random(1)
    for step in (1, 2, 7, 1000):
        for counted in (False, True):
            choice = GrowingChoice("a", 0, StopChecker(tokenizer, SamplingParams(stop=stop)), pytest.fail, None)
            form = find_format(tokenizer.chat_templates["default"])
            parser = choose_parser(form, tools, prompt_end="<think>", tokens=frozenset(tokenizer.answer_marks))
            kinds = TokenKinds(parser, tokenizer.answer_bytes)
            deltas = []
            for start in range(0, len(ids) + step, step):
                new = ids[start : start + step]
                if choice.may_stop:
                    assert not any(choice.stops_at(token_id) for token_id in new)
                else:
                    choice.token_ids.extend(new)
                if start + step >= len(ids):
                    choice.end("length", None)
                elif rng.random() < 0.3:
                    continue
                delta = choice.take_delta()
                assert delta is not None
                if counted:
                    deltas += kinds.feed(
                        delta.text, delta.token_ids, delta.marks, is_last=choice.finish_reason is not None
                    )[0]
                else:
                    deltas += parser.feed(delta.text, delta.marks)
                if choice.finish_reason is not None:
                    break
            assert assemble([*deltas, *([] if counted else parser.finish())]) == expected

"""Times the parsers of answers: microseconds a token for a long string argument in each format, and for long content.

    python scripts/tokenizer/time_parsers.py --characters 1000000

A token is four characters. The time must not grow with the answer's length.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.parsers.harmony import HarmonyParser
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import HERMES
from realizar.tokenizer.parsers.tagged_styles import GLM, MINIMAX, QWEN3_CODER

_TOKEN = 4
_TOOLS = {"f": {"properties": {"a": {"type": "string"}}}}


def answers(text: str) -> Iterator[tuple[str, OutputParser, str]]:
    """Name, parser and answer of each format; `text` is the content, or the argument of a call."""
    yield "content", AnswerParser(None, HERMES, _TOOLS), text
    yield "hermes", AnswerParser(None, HERMES, _TOOLS), f'<tool_call>{{"name": "f", "arguments": {{"a": "{text}"}}}}'
    yield "glm", AnswerParser(None, GLM, _TOOLS), f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value>"
    yield "qwen3-coder", AnswerParser(None, QWEN3_CODER, _TOOLS), f"<tool_call><function=f><parameter=a>{text}"
    start = '<minimax:tool_call><invoke name="f"><parameter name="a">'
    yield "minimax", AnswerParser(None, MINIMAX, _TOOLS), start + text
    yield "gemma4", AnswerParser(None, GEMMA, _TOOLS), f'<|tool_call>call:f{{a:<|"|>{text}<|"|>}}'
    yield "harmony", HarmonyParser(_TOOLS), f'<|channel|>commentary to=functions.f<|message|>{{"a": "{text}"}}'


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=1_000_000)
    characters: int = parser.parse_args().characters
    text = ("The quick brown fox jumps over < the lazy dog. " * (characters // 40))[:characters]
    for name, outputs, answer in answers(text):
        started = time.perf_counter()
        for at in range(0, len(answer), _TOKEN):
            outputs.feed(answer[at : at + _TOKEN])
        outputs.finish()
        taken_us = (time.perf_counter() - started) * 1e6
        print(f"{name:12} {taken_us / (len(answer) / _TOKEN):6.2f} us a token")


if __name__ == "__main__":
    main()

"""Tokens that JSON schemas force, and what answers within them cost with such tokens as drafts. On the CPU.

    python scripts/grammars/time_forced_drafts.py smollm2:135m [--drafts 4] [--rows 1,8] [--rounds 2]

The schemas are those of `bench-serve --mix`, the answers a model's own. First the share of tokens beside which no other
is allowed, and how many of them follow one another. Then answers without drafts, with drafts that prompt lookup finds,
and with those that the grammar forces too: processor time of the engine for a token on one thread, which is good where
other programs run. Ends with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from realizar import LLM, SamplingParams
from realizar.bench.serve.kinds import any_schema
from realizar.engine.core.row_grammars import RowGrammars
from realizar.engine.loading import find_checkpoint
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import GrammarFactory, only_id
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.tokenizer.load import load_tokenizer, plain_encoder

PROMPT = "Write a record as JSON:\n"
TOKENS = 200
ANSWERS = 8


def requests() -> list[SamplingParams]:
    rng = random.Random(3)
    schemas = [StructuredOutput("json_schema", json.dumps(any_schema(rng, TOKENS))) for _ in range(ANSWERS)]
    return [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS, structured=each)
        for seed, each in enumerate(schemas)
    ]


def answers(llm: LLM, rows: int) -> tuple[list[tuple[int, ...]], float]:
    """Token ids of all answers, so many of them at once, and milliseconds of the processor for a token."""
    found: list[tuple[int, ...]] = []
    wanted, started_s = requests(), time.process_time()
    for at in range(0, ANSWERS, rows):
        made = llm.generate([PROMPT] * rows, wanted[at : at + rows])
        found += [tuple(each.outputs[0].token_ids) for each in made]
    return found, 1e3 * (time.process_time() - started_s) / sum(map(len, found))


def print_forced(model: str, texts: Sequence[Sequence[int]]) -> None:
    """Print the share of tokens that a schema forces, and the mean number of them that follow one another."""
    checkpoint = find_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.vocabulary_bytes()
    source = EncodeSource(plain_encoder.__module__, plain_encoder.__name__, str(checkpoint.path))
    factory = GrammarFactory(GrammarTokens(words, tokenizer.special_ids, tokenizer.eos_ids, len(words), source))
    forced, mask = list[bool](), np.empty((1, factory.num_words), np.uint32)
    for sampling, text in zip(requests(), texts, strict=True):
        assert sampling.structured is not None
        row = factory.compile(sampling.structured).start()
        for token_id in text:
            factory.fill(row, (), mask)
            forced.append(only_id(mask[0]) is not None)
            row.advance((token_id,))
        forced.append(False)
    runs = [len(list(run)) for is_forced, run in groupby(forced) if is_forced]
    count = sum(map(len, texts))
    print(f"{sum(runs) / count:.1%} of {count} tokens are forced, {statistics.mean(runs):.1f} after one another")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    forced = RowGrammars.certain_ids
    texts: list[tuple[int, ...]] = []
    for number in range(given.rounds):
        for name, drafts, certain in (
            ("no drafts", 0, forced),
            ("looked up", given.drafts, lambda *_: ()),
            ("forced too", given.drafts, forced),
        ):
            RowGrammars.certain_ids = certain  # type: ignore[method-assign]
            llm = LLM(given.model, threads=1, context_length=1024, max_running=ANSWERS, speculative_tokens=drafts)
            answers(llm, ANSWERS)  # compiles what comes again
            for rows in map(int, given.rows.split(",")):
                found, token_ms = answers(llm, rows)
                if not texts:
                    texts = found
                    print_forced(given.model, texts)
                if found != texts:
                    print("the texts differ")
                    return 1
                print(f"round {number + 1}, {name:>10}, {rows} rows: {token_ms:.2f} ms a token", flush=True)
            llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

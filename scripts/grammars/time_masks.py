"""Time of a step's grammar masks: within one process, and in the processes of their own that the engine uses.

    python scripts/grammars/time_masks.py MODEL [--rows 1,8,64] [--steps 40]

Rows follow regular expressions, all of them one or each its own, and take a random allowed token at each step. Prints
the median milliseconds of a step's masks both ways, and the median to compile one more grammar.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.engine.loading import find_checkpoint
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import GrammarFactory
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.structured.workers.service import GrammarService
from realizar.tokenizer.load import load_tokenizer, plain_encoder

Masks = Callable[[], list[NDArray[np.uint32]]]
Advance = Callable[[int, int], None]


def grammar(number: int) -> StructuredOutput:
    """One that never has to end within the steps of a run."""
    return StructuredOutput("regex", rf"([a-z]{{1,9}} ){{1,500}}x{number}")


def inside(factory: GrammarFactory, grammars: Sequence[StructuredOutput]) -> tuple[Masks, Advance]:
    compiled = {structured: factory.compile(structured) for structured in set(grammars)}
    rows = [compiled[structured].start() for structured in grammars]
    found = np.empty((len(rows), 1, factory.num_words), np.uint32)

    def masks() -> Any:
        for row, mask in zip(rows, found, strict=True):
            factory.fill(row, (), mask)
        return found

    return masks, lambda place, id_: rows[place].advance([id_])


def outside(service: GrammarService, grammars: Sequence[StructuredOutput]) -> tuple[Masks, Advance]:
    for structured in grammars:
        service.prepare(structured)
    slots = np.array([service.open_row(structured, ()).slot for structured in grammars])

    def masks() -> Any:
        service.rows.ask(slots, {})
        while not service.rows.are_done(slots).all():
            service.rows.wait(10.0)
        return service.rows.memory.masks[service.rows.memory.mask_indices[slots]][:, None]

    def advance(place: int, token_id: int) -> None:
        service.rows.advance(slots[place : place + 1], np.array([[token_id]], np.int32), np.ones(1, np.intp))

    return masks, advance


def step_ms(masks: Masks, advance: Advance, steps: int) -> float:
    """The median time of a step's masks."""
    rng = random.Random(1)
    times = []
    for _ in range(steps):
        started_s = time.perf_counter()
        found = masks()
        times.append(1e3 * (time.perf_counter() - started_s))
        for place, mask in enumerate(found):
            allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
            advance(place, int(rng.choice(allowed)))
    return statistics.median(times)


def compile_ms(compile_one: Callable[[StructuredOutput], object]) -> float:
    times = []
    for number in range(1000, 1009):
        started_s = time.perf_counter()
        compile_one(grammar(number))
        times.append(1e3 * (time.perf_counter() - started_s))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    checkpoint = find_checkpoint(given.model)
    tokenizer = load_tokenizer(checkpoint)
    words = tokenizer.vocabulary_bytes()
    source = EncodeSource(plain_encoder.__module__, plain_encoder.__name__, str(checkpoint.path))
    tokens = GrammarTokens(words, tokenizer.special_ids, tokenizer.eos_ids, len(words), source)
    started_s = time.perf_counter()
    service = GrammarService(tokens)
    service.prepare(grammar(0))
    print(f"the first grammar, with the vocabulary: {time.perf_counter() - started_s:.2f} s")
    factory = GrammarFactory(tokens)
    print("| rows | grammars | one process, ms | processes of their own, ms |\n|---|---|---|---|")
    for count in map(int, given.rows.split(",")):
        for different in (False, True) if count > 1 else (False,):
            grammars = [grammar(place if different else 0) for place in range(count)]
            here = step_ms(*inside(factory, grammars), given.steps)
            there = step_ms(*outside(service, grammars), given.steps)
            print(f"| {count} | {'each its own' if different else 'one'} | {here:.2f} | {there:.2f} |")
    print(
        f"one more grammar: {compile_ms(factory.compile):.1f} ms in one process, {compile_ms(service.prepare):.1f} ms"
    )
    service.close()


if __name__ == "__main__":
    main()

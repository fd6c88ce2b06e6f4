"""What a tokenizer and its texts take of the processor: `python scripts/tokenizer/time_tokenizer.py gemma3:270m`.

A text is taken twice, as pieces are remembered; each script's first characters come to it as to a server.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from realizar.engine.loading import find_checkpoint
from realizar.tokenizer.load import load_tokenizer

WORDS = {
    "English": "the river runs past a village where nobody had seen so much water in any spring before",
    "Korean": "강은 마을을 지나 흐르고 아무도 봄에 그렇게 많은 물을 본 적이 없었다",
    "Chinese": "河流 经过 村庄 那里 没有人 在 任何 春天 见过 这么多 水",
    "Russian": "река течёт мимо деревни где никто не видел столько воды ни одной весной",
}
CHARACTERS = 300_000
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    checkpoint = find_checkpoint(parser.parse_args().model)
    loaded_s, tokenizer = _timed(lambda: load_tokenizer(checkpoint))
    _say(f"load: {loaded_s:.2f} s of the processor")
    rng = random.Random(1)
    texts = {name: " ".join(rng.choices(words.split(), k=CHARACTERS // 6)) for name, words in WORDS.items()}
    texts["random letters"] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=CHARACTERS))
    for name, text in texts.items():
        first_s, _ = _timed(partial(tokenizer.encode, text[:1]))
        once_s, again_s = (_timed(partial(tokenizer.encode, text))[0] for _ in range(2))
        each, later = (1e6 * taken_s / len(text) for taken_s in (once_s, again_s))
        _say(f"{name}: first character {1e3 * first_s:.2f} ms, then {each:.2f} us a character, {later:.2f} again")


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    started_s = time.process_time()
    result = work()
    return time.process_time() - started_s, result


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()

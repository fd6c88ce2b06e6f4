"""Write what small models give in exact arithmetic, and what the CPU draws, for the comparison of GPUs.

    python scripts/verdict/record_small_models.py

After a change of those models, of their steps or of the sampler. Prints how far the CPU is from exact.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT / "tests"))

from backends.verdict.small_runs import exact_logprobs, run_on_cpu  # noqa: E402
from realizar.backends.verdict.compare import digest, recorded  # noqa: E402
from realizar.backends.verdict.small_models import SMALL_MODELS  # noqa: E402
from realizar.backends.verdict.small_steps import Seen  # noqa: E402

_FILE = _ROOT / "src" / "realizar" / "backends" / "verdict" / "expected.npz"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    arrays: dict[str, Any] = {}
    for model in SMALL_MODELS:
        spec, checkpoint = model.make()
        on_cpu, exact = run_on_cpu(spec, checkpoint), exact_logprobs(spec, checkpoint)
        parts = recorded(Seen(exact, on_cpu.greedy, on_cpu.drawn)) | {"digest": digest(checkpoint)}
        arrays |= {f"{model}/{part}": values for part, values in parts.items()}
        nats = (np.exp(exact) * (exact - on_cpu.logprobs)).sum(axis=1)
        print(f"{model}: the CPU diverges by {nats.mean():.2g} nats, {nats.max():.2g} at most", flush=True)
    np.savez_compressed(_FILE, **arrays)
    print(f"{_FILE}: {_FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

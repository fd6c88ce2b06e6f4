"""`backends.ranks.process` of a rank that stalls in its fifth step, though no signal has stopped it."""

from __future__ import annotations

import sys
import time
from itertools import count

from realizar.backends.ranks import process
from waits import HANG_S

_STEP = 5
_numbers, _unpack = count(1), process.unpack_step


def _unpack_or_stall(call: process.Submit) -> object:
    if next(_numbers) == _STEP:
        time.sleep(2 * HANG_S)
    return _unpack(call)


if __name__ == "__main__":
    process.unpack_step = _unpack_or_stall  # type: ignore[assignment]
    sys.exit(process.main())

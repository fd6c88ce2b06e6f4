"""Makes the helpers in tests/ importable."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

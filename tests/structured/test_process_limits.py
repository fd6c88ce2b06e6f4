"""A grammar's process keeps its bounds under whatever hard limits its parent has."""

from __future__ import annotations

import subprocess
import sys

from waits import HANG_S

SCRIPT = """
import resource
hard = 1 << 33
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
from realizar.structured.workers import worker_process as process
said = []
process.limit_cpu(3)
said.append(resource.getrlimit(resource.RLIMIT_CPU)[0] < 1000)
process.limit_cpu(None)
said.append(resource.getrlimit(resource.RLIMIT_CPU) == (1000, 1000))
process.os.dup2 = lambda *_: None  # what is said here is read
process.limit_process(1 << 40)
said.append(resource.getrlimit(resource.RLIMIT_DATA) == (hard, hard))
print(said)
"""


def test_hard_limits_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "[True, True, True]\n", done.stderr

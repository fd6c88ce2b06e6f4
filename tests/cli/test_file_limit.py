"""Connections fit under the limit of open files, which is raised where it may be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from waits import HANG_S

SCRIPT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from realizar.cli.commands.serve import fit_connections
print(fit_connections({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [(200, 1000, 100, "100 200"), (100, 1000, 400, "400 464"), (100, 300, 400, "236 300"), (64, 64, 4, "64 files")],
)
def test_connections_fit_under_the_limit(soft: int, hard: int, wanted: int, expected: str) -> None:
    script = SCRIPT.format(soft=soft, hard=hard, wanted=wanted)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == (hard > 64)

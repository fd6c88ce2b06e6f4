"""Loading a model takes little memory beside its packed weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import SHAPES
from wider import wider

_STATUS = Path("/proc/self/status")
_LOAD = """
import sys
from pathlib import Path
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.select import resolve_model
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig

checkpoint = open_checkpoint(sys.argv[1])
backend = CPUBackend()
spec, config = resolve_model(checkpoint, EngineConfig(context_length=512, device="cpu"))
backend.load(spec, checkpoint, config)
backend.shutdown()
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.skipif(not _STATUS.exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("model", wider(["smollm2_path", "gemma3_path"], "smollm2_path"))
def test_peak_memory(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    limit_bytes = 250e6 + 1.3 * path.stat().st_size

    def peak_bytes() -> int:
        done = subprocess.run([sys.executable, "-c", _LOAD, path], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert peak_bytes() <= limit_bytes or peak_bytes() <= limit_bytes, "the first may have compiled"


@pytest.mark.skipif(not _STATUS.exists(), reason="peak memory is read from /proc")
def test_peak_memory_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged tensors of 170 MB in all: each expert's pages are released when it is packed."""
    shape = replace(SHAPES["tiny-moe"], num_experts=64, expert_size=512, num_layers=3, hidden_size=1024)
    monkeypatch.setitem(SHAPES, "wide-moe", shape)
    path = tmp_path / "moe.gguf"
    generate_gguf("wide-moe", path, "q4_k_m")
    size = path.stat().st_size
    assert size > 150e6
    done = subprocess.run([sys.executable, "-c", _LOAD, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 250e6 + 1.3 * size

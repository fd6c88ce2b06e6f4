"""Every script imports what there is and answers --help; all of them in one process, since torch takes its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waits import HANG_S

SCRIPTS = Path(__file__).parents[2] / "scripts"
_RUN_ALL = """
import contextlib, io, json, runpy, sys
ends = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
        end = "no help"
    except SystemExit as exit:
        end = "" if exit.code in (0, None) and "usage" in said.getvalue().lower() else f"status {exit.code}"
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    ends[script] = end
print(json.dumps(ends))
"""


def ends_of(*scripts: Path) -> dict[str, str]:
    """The error of each script that was run for its help, by name; an empty text is success."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{_RUN_ALL}"
    command = [sys.executable, "-c", code, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    return {Path(script).name: end for script, end in json.loads(done.stdout.splitlines()[-1]).items()}


def test_every_script_answers_help() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SCRIPTS.glob("*.py"))}
    scripts = [path for path, text in texts.items() if '__name__ == "__main__"' in text]
    assert len(scripts) > 8
    for module in texts.keys() - set(scripts):  # it serves a script
        assert any(f"from {module.stem} import" in texts[script] for script in scripts), module.name
    ends = ends_of(*scripts)
    lacking = {name: end for name, end in ends.items() if end.startswith("ModuleNotFoundError: No module named")}
    assert {name: end for name, end in ends.items() if end and name not in lacking} == {}
    if lacking:
        modules = sorted({end.split("'")[1].split(".")[0] for end in lacking.values()})
        assert set(modules) <= {"torch", "triton", "cuda"}
        pytest.skip(f"{', '.join(lacking)} need {', '.join(modules)}")


def test_a_script_that_fails_is_found(tmp_path: Path) -> None:
    """The rule above can fail."""
    broken, silent = tmp_path / "broken.py", tmp_path / "silent.py"
    broken.write_text("from realizar.errors import Nonesuch\n")
    silent.write_text("print('usage')\n")
    ends = ends_of(broken, silent)
    assert ends["broken.py"].startswith("ImportError")
    assert ends["silent.py"] == "no help"

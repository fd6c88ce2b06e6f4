"""`python -m parity_table.llama_cpp --source LLAMA_CPP`: llama.cpp reads the same F32 GGUF files, and its logits agree.

LLAMA_CPP is a folder of its sources with a build of shared libraries in `build`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from architectures import CASES, BuiltCase, expected_logits
from parity_table.checkpoints import build
from parity_table.measure import LENGTHS, first_length
from parity_table.page import DIFFERENCES, load, save

_PROGRAM = Path(__file__).with_name("llama_cpp_logits.cpp")
MOST = 1e-3
"""The relative error of all logits beyond which a row fails, but for those that `DIFFERENCES` explains."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="rows of these alone")
    options = parser.parse_args()
    figures, failed = load(), False
    noted = figures.setdefault("llama.cpp", {})
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(options.source, Path(folder))
        for name in options.case or [name for name, case in CASES.items() if "gguf" in case.forms]:
            noted[name] = _measure(program, name, Path(folder))
            failed |= name not in DIFFERENCES and any(
                error is None or not error <= MOST for error in noted[name].values()
            )
            sys.stdout.write(f"{name} {noted[name]}\n")
            sys.stdout.flush()
    save(figures)
    return int(failed)


def compile_program(source: Path, folder: Path) -> Path:
    """The program that prints logits, in `folder`, of llama.cpp's sources."""
    program, libraries = folder / "llama_cpp_logits", source.resolve() / "build" / "bin"
    headers = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    command = ["g++", "-O2", "-std=c++17", *headers, str(_PROGRAM), "-o", str(program), f"-L{libraries}", "-lllama"]
    subprocess.run([*command, "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"], check=True)
    return program


def _measure(program: Path, name: str, folder: Path) -> dict[str, float | None]:
    """Relative error of all logits to transformers' by length; None where llama.cpp does not read the file."""
    built = build(name, "F32 GGUF", folder, max(LENGTHS))
    context = built.context_length or built.model.config.get_text_config().max_position_embeddings
    errors: dict[str, float | None] = {}
    for length in LENGTHS:
        if first_length(built) <= length <= context:
            part = built._replace(token_ids=built.token_ids[:length])
            expected, found = expected_logits(part), read_logits(program, part, context)
            errors[str(length)] = None
            if found is not None:
                errors[str(length)] = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return errors


def read_logits(
    program: Path, built: BuiltCase, context: int, choices: Path | None = None
) -> NDArray[np.float32] | None:
    """llama.cpp's logits [tokens, vocab_size]; None where it does not read the file.

    Args:
        choices: gets the experts that tokens went through.
    """
    ids = " ".join(map(str, built.token_ids))
    command = [program, built.path, str(context), *([] if choices is None else [choices])]
    run = subprocess.run(command, input=ids.encode(), capture_output=True, check=False)
    if run.returncode:
        sys.stderr.write(run.stderr.decode(errors="replace")[-2000:])
        return None
    return np.frombuffer(run.stdout, np.float32).reshape(len(built.token_ids), -1)


if __name__ == "__main__":
    sys.exit(main())

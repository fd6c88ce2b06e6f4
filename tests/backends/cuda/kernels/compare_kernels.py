"""Machine code of every kernel, to compare two versions of the sources; run as a script, without a GPU.

A rename must change no instruction. `write FILE` compiles the kernels of CUDA C++ and Triton that the compile tests
know, for compute capability 8.0, 9.0 and 10.0, and writes for each its registers, its stack, shared and local memory in
bytes, and a hash of its instructions, in which no name occurs. `compare BEFORE AFTER` lists the differences and fails
where there is one. Run it from the folder of tests of each version, with that version's sources on the path:

    python -m backends.cuda.kernels.compare_kernels write before.json
    python -m backends.cuda.kernels.compare_kernels compare before.json after.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90, 100)
_RESOURCES = ("REG", "STACK", "SHARED", "LOCAL")


def disassembler() -> Path:
    """Triton's cuobjdump."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def code_of(cubin: bytes) -> list[dict[str, Any]]:
    """Resources and a hash of the instructions of each entry point, in the order of their names."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = (
            subprocess.run([disassembler(), option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = []
    for function, resources in re.findall(r"Function (\w+):\s*\n\s*(REG:.*)", usage):
        numbers = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", resources) if name in _RESOURCES}
        body = code.split(f"Function : {function}\n", 1)[1].split("Function : ", 1)[0]
        instructions = re.findall(r"/\*\w{4,}\*/\s+([^;]*;)\s+/\* (0x\w+) \*/\s*\n\s*/\* (0x\w+) \*/", body)
        assert len(instructions) > 3, function
        digest = hashlib.sha256(repr(instructions).encode()).hexdigest()[:16]
        found.append({"function": function, **numbers, "instructions": len(instructions), "hash": digest})
    return sorted(found, key=lambda each: str(each["function"]))


def native_sources(capability: int) -> Iterator[tuple[str, Any]]:
    """Labels and sources of CUDA C++."""
    from realizar.backends.cuda.layouts.fragments import fragment_format
    from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS
    from realizar.backends.cuda.native.sources import (
        MatvecTiles,
        MmaSyncTiles,
        Tiles,
        WgmmaTiles,
        activations_source,
        matmul_source,
        repack_source,
    )
    from realizar.quantization import ggml_layouts as ggml

    hopper = capability == 90
    plain: list[Tiles] = [MatvecTiles(1, 8, 1, 2, 3), MmaSyncTiles(16, 2, 4, 1)]
    plain += [WgmmaTiles(16, 1, 2, 4, 1, 1)] if hopper else []
    quantized = [layout for layout in ggml.GGML_LAYOUTS.values() if not layout.is_float]
    formats = {fragment_format(layout): layout.name for layout in reversed(quantized)}
    for (each, name), tiles in product(formats.items(), plain):
        yield f"plain {name} {tiles}", matmul_source((each,), tiles)
    q4, q6, q8 = (fragment_format(layout) for layout in (ggml.Q4_K, ggml.Q6_K, ggml.Q8_0))
    more: list[Tiles] = [MatvecTiles(1, 4, 2, 1, 4), MatvecTiles(2, 4, 2, 1, 4), MmaSyncTiles(128, 1, 3, 1)]
    more += [WgmmaTiles(128, 2, 2, 4, 1, 1), WgmmaTiles(256, 1, 2, 4, 1, 1)] if hopper else []
    for tiles in more:
        yield f"more {tiles}", matmul_source((q4,), tiles)
    for tiles in plain:
        yield f"merged {tiles}", matmul_source((q4, q6), tiles)
    gated: list[Tiles] = [MatvecTiles(1, 2, 2, 2, 7), MatvecTiles(1, 2, 6, 1, 2), MatvecTiles(2, 2, 1, 2, 8)]
    if hopper:
        gated += [WgmmaTiles(8, 2, 2, 4, 2, 1), WgmmaTiles(32, 2, 1, 6, 2, 1), WgmmaTiles(64, 2, 1, 3, 2, 2)]
        gated += [WgmmaTiles(128, 2, 2, 3, 2, 1), WgmmaTiles(128, 2, 1, 6, 2, 1)]
    for tiles in gated:
        yield f"silu {tiles}", matmul_source((q4,), tiles, "silu")
        yield f"gelu_tanh {tiles}", matmul_source((q6,), tiles, "gelu_tanh")
        yield f"gelu {tiles}", matmul_source((q8,), tiles, "gelu")
    residual = (MatvecTiles(1, 1, 12, 2, 2), MatvecTiles(1, 2, 2, 2, 6), MatvecTiles(2, 1, 8, 2, 2))
    for tiles, each in product(residual, (q4, q8)):
        yield f"residual {each.bits} {tiles}", matmul_source((each,), tiles, "residual")
    yield "activations", activations_source()
    for layout in REPACKED_LAYOUTS:
        yield f"repack {layout.name}", repack_source(layout, fragment_format(layout))
    yield from _attention_sources()


def _attention_sources() -> Iterator[tuple[str, Any]]:
    """Attention of single tokens: every element and output, norms, ropes, warps and stages of several kinds."""
    from realizar.backends.cuda.native.attend_source import AttendKernel

    for kernel in (
        AttendKernel(128, 4, 3, False, 0, False, 128, False, "bf16", 16, "f32", 1),
        AttendKernel(128, 4, 1, True, 1, False, 128, False, "f16", 16, "int8", 1, 8, 16, 2, 4),
        AttendKernel(64, 8, 2, False, 2, True, 32, True, "int8", 32, "half", 8, 2, 16, 1, 1, cap=True),
        AttendKernel(256, 4, 1, False, 1, False, 256, False, "f16", 16, "half", 64, 4, 16, 1, 4),
        AttendKernel(128, 7, 2, True, 0, False, 128, True, "bf16", 16, "half", 16, 8, 16, 1, 1),
        AttendKernel(80, 1, 1, False, 0, False, 0, False, "f16", 16, "int8", 1, 4, 12, 1, 4),
    ):
        yield f"attend {kernel.head} {kernel.group} {kernel.element} {kernel.out}", kernel.source()


def native_code(capability: int) -> dict[str, Any]:
    """Code of the CUDA C++ kernels, by labels that name no identifier of theirs."""
    from realizar.backends.cuda.native.compiler import architecture, compile_sources

    labels, sources = zip(*native_sources(capability), strict=True)
    major, minor = divmod(capability, 10)
    return {
        f"sm_{capability} {re.sub(r'[a-z]+=', '', label)} {index}": code
        for label, cubin in zip(labels, compile_sources(sources, architecture((major, minor))), strict=True)
        for index, code in enumerate(code_of(cubin))
    }


def triton_code(capability: int) -> dict[str, Any]:
    """Code of the Triton kernels, by their hash, as neither their names nor their order need stay."""
    import triton
    from triton.backends.compiler import GPUTarget

    from backends.cuda.kernels import compile_launches as compiled

    compiled.launches.clear()
    compiled.run_backend(tuple(compiled.RECIPES), len(compiled.FORMATS), compiled.SHARED_BYTES[capability])
    found: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for source, options in compiled.launches.values():
        if "DEPENDENT" in source.fn.arg_names:
            source.constants[(source.fn.arg_names.index("DEPENDENT"),)] = capability >= 90
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        (code,) = code_of(kernel.asm["cubin"])
        times[code["hash"]] += 1
        found[f"sm_{capability} triton {code['hash']} {times[code['hash']]}"] = code | {
            "SHARED": kernel.metadata.shared
        }
    return found


def write(path: Path) -> None:
    """Write the code of all kernels, after each compute capability what there is."""
    found: dict[str, Any] = {}
    for capability in CAPABILITIES:
        found |= native_code(capability) | triton_code(capability)
        sys.stdout.write(f"sm_{capability}: {len(found)} kernels so far\n")
        sys.stdout.flush()
        path.write_text(json.dumps(found, indent=1))


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each kernel that is lacking, new, or not the same."""
    lines = [f"lacking: {label} ({before[label]['function']})" for label in before if label not in after]
    lines += [f"new: {label} ({after[label]['function']})" for label in after if label not in before]
    for label in before.keys() & after.keys():
        one, two = before[label], after[label]
        changed = [f"{key} {one[key]} -> {two[key]}" for key in one if key != "function" and one[key] != two[key]]
        if changed:
            lines.append(f"{label} ({two['function']}): {', '.join(changed)}")
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.action == "write":
        os.environ.pop("TRITON_INTERPRET", None)
        write(arguments.files[0])
        return 0
    before, after = (json.loads(path.read_text()) for path in arguments.files)
    lines = differences(before, after)
    lines.append(f"{len(before)} kernels before, {len(after)} after: {len(lines)} differ")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if len(lines) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles every Triton kernel as the backend launches it, for GPUs that are not there; run as a script.

The backend runs on the CPU with launches replaced by compilation, so nothing is computed. Prints one line per target:
kernels compiled, and the most shared memory among them. Fails where one does not compile, or where a kernel that may
start early reads memory before it has waited.

    python compile_launches.py 80 86 89 90 100 120
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backends.cuda import cuda_runs
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cuda import load
from realizar.backends.cuda.cache_copies import read_places, write_places
from realizar.backends.cuda.device import interpreter_device
from realizar.backends.cuda.kernel_sizes import compute_type
from realizar.backends.cuda.kernels.fetch import fetch
from realizar.backends.cuda.matmul import linears
from realizar.backends.cuda.matmul.inputs import InputFormat
from realizar.backends.cuda.ranks.peers import PeerMemory
from realizar.config import EngineConfig
from realizar.models.shard import shard

_EARLY = {"attend_parts": 4}  # row, token and length of a decode, and the tables' stride
# What no kernel of a step writes before it: states, rings and vectors.
_READS_OLDER = ("recur", "recur_once", "normalize", "normalize_parallel", "normalize_twice", "add_norm")
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
RECIPES = {  # by element type of the cache, and size of heads, but for those that are named after a part
    "f16": Recipe(128, 8, 2, weights="Q4_K", windows=(None, 64), parts=("biases", "qk_norm", "growth")),
    "bf16": Recipe(256, 4, 1, weights="Q6_K", parts=("soft_cap", "post_norms"), activation="gelu_tanh"),
    "int8": Recipe(
        64,
        6,
        2,
        weights="IQ4_NL",
        parts=("sinks", "interleaved", "layer_norm", "qk_norm", "ungated"),
        activation="relu_squared",
    ),
    "wide": Recipe(
        256,
        8,
        4,
        hidden_size=512,
        weights="Q4_K",
        windows=(64, None),
        full_head_size=512,
        activation="gelu_tanh",
        parts=("qk_norm", "value_norm", "k_is_v", "post_norms", "output_scale"),
    ),
    "shared": Recipe(
        256,
        8,
        1,
        weights="Q8_0",
        windows=(64, None, 64, None),
        full_head_size=512,
        activation="gelu_tanh",
        parts=("qk_norm",),
        sources=(None, None, 0, 1),
        input_size=64,
    ),
    "parallel": Recipe(
        64,
        4,
        2,
        weights="Q8_0",
        windows=(None, None),
        experts=6,
        per_token=2,
        parts=("shared", "own_norms", "expert_scales", "post_norms", "layer_norm", "biases"),
        activation="gelu_tanh",
    ),
    "f32": Recipe(96, 4, 4, weights="F32", parts=("token_norm", "ungated"), activation="gelu"),
    "states": Recipe(
        128,
        8,
        2,
        weights="Q4_K",
        windows=(None,) * 4,
        parts=("output_gate", "biases", "tiled"),
        recurrent=("delta", "convolution", None, "delta"),
        value_heads=4,
        key_size=128,
        value_size=128,
    ),
    "float-states": Recipe(
        64,
        4,
        2,
        weights="F32",
        windows=(None,) * 3,
        parts=("output_gate", "token_norm"),
        recurrent=("delta", None, "convolution"),
        key_size=128,
        value_size=96,
        length=3,
    ),
} | {
    f"{kv}-{head}": Recipe(head, 8, 1, hidden_size=256, weights="F32" if kv == "f32" else "Q8_0", windows=(None,))
    for kv in ("f16", "bf16", "int8", "fp8", "f32")
    for head in (64, 80, 128, 256, 512)
}
RANKED = ("f16", "bf16", "parallel")  # of the recipes
FORMATS = (None, InputFormat("int8"), InputFormat("half", 8), InputFormat("half", 64), InputFormat("fp8", 128))

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


launches: dict[Any, tuple[ASTSource, dict[str, Any]]] = {}


def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """A stand-in for `JITFunction.run`."""
    names = self.arg_names
    values = dict(zip(names, args, strict=False))
    compile_options = {key: options.pop(key) for key in ("num_warps", "num_stages") if key in options}
    options.pop("launch_pdl", None)
    values.update(options)
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, parameter in zip(names, self.params, strict=True):
        value = values.get(name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, tuple):
            signature[name] = tuple(map(_type_of, value))
        else:
            signature[name] = _type_of(value)
    shown = {key: str(value) for key, value in constants.items()}
    key = (self.fn.__name__, tuple(signature.items()), tuple(shown.items()), tuple(compile_options.items()))
    if key not in launches:
        attributes = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name][0].startswith("*")
        }
        launches[key] = (ASTSource(self, signature, constants, attributes), compile_options)


def stand_in(module: ModuleType, name: str, value: object) -> None:
    """Replace a function where a module looks it up; one that it no longer has is an error, not a new name."""
    assert callable(getattr(module, name))
    setattr(module, name, value)


def run_backend(recipes: Sequence[str], formats: int, shared_bytes: int) -> None:
    """Record the launches of a chunk, of a decode, and of both in a step, of recipes and formats of activations.

    Args:
        shared_bytes: of a block, on the card that they are for.
    """
    triton.runtime.jit.JITFunction.run = record
    device = dataclasses.replace(interpreter_device(), shared_bytes=shared_bytes)
    stand_in(cuda_runs, "interpreter_device", lambda: device)
    stand_in(load, "compute_type", lambda dtype, is_gpu: compute_type(dtype, is_gpu=True))
    stand_in(linears, "matmul_type", lambda device: tl.float16)
    plain_formats = linears.MergedLinear.input_formats
    plain_launch = linears.MergedLinear.launch
    plain_finishes = linears.MergedLinear.applies_norm_scale
    packed = linears.MergedLinear.all_packed
    for name, recipe in ((name, RECIPES[name]) for name in recipes):
        for activation_format in FORMATS[:formats]:
            linears.MergedLinear.input_formats = (
                plain_formats
                if activation_format is None
                else (lambda self, kind, activation_format=activation_format: (activation_format,))
            )
            linears.MergedLinear.launch = plain_launch if activation_format is None else (lambda *_: None)
            linears.MergedLinear.all_packed = packed if activation_format is None else True
            finishes = activation_format is None or activation_format.kind != "fp8"
            linears.MergedLinear.applies_norm_scale = plain_finishes if finishes else (lambda *_: False)
            by_turns = (
                activation_format is not None and activation_format.kind == "half" and "biases" not in recipe.parts
            )
            linears.MergedLinear.interleaved = property(lambda self, by_turns=by_turns: by_turns)
            element = name.partition("-")[0]
            kv_dtype: Any = {
                "f32": "auto",
                "wide": "bf16",
                "parallel": "bf16",
                "shared": "int8",
                "states": "f16",
                "float": "auto",
            }.get(element, element)
            config = EngineConfig(max_running=4, max_step_tokens=32, kv_cache_dtype=kv_dtype, context_length=256)
            made = cuda_runs.GPURunner(*random_model(recipe), config)
            ids = random_tokens(recipe, 40)
            first, second = made.request(0, ids), made.request(1, ids, first=8)
            made.step([(first, 20)])
            made.step([(first, 1), (second, 20)])
            made.step([(first, 1), (second, 1)])
            if activation_format is None or activation_format.kind == "half":
                fixed = cuda_runs.GPURunner(*random_model(recipe), dataclasses.replace(config, batch_invariant=True))
                fixed.step([(fixed.request(0, ids), 1), (fixed.request(1, ids, first=8), 20)])
        if name in RANKED:
            run_rank(recipe)
    integers = torch.zeros(4, dtype=torch.int32)
    fetch[(2,)](integers, integers, COUNT=2, WHOLE=1, BLOCK=1024)  # of real GPUs alone
    planes = [torch.zeros(3, 40, dtype=torch.float16), torch.zeros(3, 12, dtype=torch.uint8)]
    write_places(planes, [2], read_places(planes, [1], interpreter_device())(), interpreter_device())()


def run_rank(recipe: Recipe) -> None:
    """Record the launches of one of four ranks, of few tokens and of more than are added up at once."""
    spec, checkpoint = random_model(dataclasses.replace(recipe, num_kv_heads=4, num_heads=8, feed_forward_size=1024))
    config = EngineConfig(max_running=4, max_step_tokens=640, context_length=1024)
    made = cuda_runs.GPURunner(shard(spec, 1, 4), checkpoint, config, ranks=_Others())
    request = made.request(0, random_tokens(recipe, 700))
    made.step([(request, 600)])
    made.step([(request, 1)])


class _Others:
    """A `RankGroup` of ranks that nobody writes to."""

    def share(self, num_bytes: int) -> PeerMemory:
        return PeerMemory(1, [0] * 4, 0, torch.zeros(2, dtype=torch.int32), 0, 0)

    def least(self, own: int) -> int:
        return own

    def add_up(self, values: torch.Tensor, total: torch.Tensor) -> None:
        raise AssertionError

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        raise AssertionError

    def close(self) -> None:
        """There is nothing."""


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def waits_first(name: str, ptx: str) -> bool:
    """True if a kernel waits before it accesses memory, but for the step's own integers that `_EARLY` allows.

    Kernels of `_READS_OLDER` may read before, and wait before they write.
    """
    accesses = list(re.finditer(r"\b(ld|st|atom|red)\.[a-z.]*global\S*", ptx))
    wait = ptx.find("griddepcontrol.wait")
    before = [access.group() for access in accesses if wait < 0 or access.start() < wait]
    if name in _READS_OLDER:
        return wait >= 0 and all(access.startswith("ld.") for access in before)
    return len(before) <= _EARLY.get(name, 0) and all(access == "ld.global.b32" for access in before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", type=int, nargs="+")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--formats", type=int, default=len(FORMATS), help="how many of the formats of activations")
    parser.add_argument("--kernels", default="", help="what the names of kernels begin with")
    arguments = parser.parse_args()
    failed = 0
    for capability in arguments.targets:
        launches.clear()
        run_backend(arguments.recipes.split(","), arguments.formats, SHARED_BYTES[capability])
        wanted = {key: item for key, item in launches.items() if key[0].startswith(arguments.kernels)}
        target = GPUTarget("cuda", capability, 32)

        def build(
            item: tuple[ASTSource, dict[str, Any]], target: GPUTarget = target, capability: int = capability
        ) -> Any:
            source, options = item
            if "DEPENDENT" in source.constants or any("DEPENDENT" in str(name) for name in source.fn.arg_names):
                place = (source.fn.arg_names.index("DEPENDENT"),)
                source.constants[place] = capability >= 90
            return triton.compile(source, target=target, options=options)

        most = 0
        for key, item in wanted.items():
            try:
                kernel = build(item)
            except Exception as error:  # noqa: BLE001 the list of failures is the result
                failed += 1
                report(f"sm_{capability} {key[0]}: {type(error).__name__}: {str(error)[:300]} {key[2]}")
                continue
            if capability >= 90 and "DEPENDENT" in item[0].fn.arg_names and not waits_first(key[0], kernel.asm["ptx"]):
                failed += 1
                report(f"sm_{capability} {key[0]}: reads memory before it waits for the kernel before it")
            most = max(most, kernel.metadata.shared)
            if kernel.metadata.shared > SHARED_BYTES[capability]:
                failed += 1
                report(f"sm_{capability} {key[0]}: {kernel.metadata.shared} bytes of shared memory {key[2]}")
        report(f"sm_{capability}: {len(wanted)} kernels, at most {most} bytes of shared memory")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

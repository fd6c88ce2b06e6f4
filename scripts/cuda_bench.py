"""Times decode and prefill of a generated model on a GPU, through the engine, beside llama.cpp's figures on an H200.

The model has the shapes and types of a real one and random weights, made in memory: layers' matrices of one shape and
type have the same bytes. Rows of a mixture get random tokens, and the number of experts that a layer read stands beside
chance; other rows are greedy. Before timing, a step's graph is compared with its launches one by one, bit for bit.

    python scripts/cuda_bench.py --shape llama-8b --batches 1,8,16,64,256 --prefill 2048
    python scripts/cuda_bench.py --shape llama-8b --batches '' --prefill 2048,16384 --profile
    python scripts/cuda_bench.py --shape llama-1b --batches 64,256 --prefill 0 --sampled
    python scripts/cuda_bench.py --shape qwen3.6-35b-a3b --type fp8 --layers 8 --batches 1,64,256 --prefill 8192
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import Capacity, ForwardInput
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.weights.experts import check_finite
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import Packer, reserve
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import resolve_model
from realizar.batch import OpenedRow, StepOutput, StepRows
from realizar.bench.throughput import DrawnDrafts, Work, by_chance, measure, measure_batch, next_tokens
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.draft_models import open_drafter
from realizar.models.generated import generate
from realizar.models.generated.shapes import SHAPES, Shape
from realizar.models.spec import ModelSpec
from realizar.quantization.microscaling import e4m3
from realizar.quantization.source import MatrixSource
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy

# llama.cpp b11434 on an H200: tokens/s by sequences, and of a prompt of 2,048.
PEER: dict[str, dict[int | str, int]] = {
    "llama-8b": {
        1: 253, 2: 471, 4: 695, 8: 961, 16: 2077, 32: 3335, 64: 4669, 128: 5406, 256: 6235, "prefill 2048": 9715,
    },
    "llama-1b": {1: 846, "prefill 2048": 44281},
    "gpt-oss-20b": {1: 314, 8: 845, 16: 1049, 64: 2462, 256: 4770, "prefill 2048": 12765},
    "qwen2.5-1.5b": {1: 559, 2: 923, 4: 1422, 8: 2246, 16: 3700, 32: 5758, 64: 8305, 256: 14179, "prefill 2048": 28522},
    "qwen3-30b-a3b": {1: 287, 8: 868, 16: 1438, 64: 3487, 256: 5889, "prefill 2048": 12248},
}  # fmt: skip
TARGET: dict[str, dict[int | str, int]] = {
    "llama-8b": {
        1: 720, 8: 4300, 16: 8000, 64: 20500, 96: 24000, 128: 27000, 192: 26500, 256: 30000, "prefill 2048": 39000,
        "prefill 8192": 36500, "prefill 16384": 33000, "prefill 65536": 17500,
    },
    "llama-1b": {1: 2800, 64: 88000},
    "qwen3-0.6b": {1: 2600},
    "qwen3-30b-a3b": {1: 750, 8: 2800, 16: 4000, 64: 9500, 256: 22000, "prefill 16384": 40000},
    "gpt-oss-20b": {1: 900, 8: 2800, 16: 4300, 64: 12500, 256: 26000, "prefill 16384": 70000},
    "gpt-oss-120b": {1: 600, 64: 3400},
    "qwen2.5-1.5b": {1: 1500},
    "qwen3.6-35b-a3b": {
        1: 700, 8: 2900, 16: 4200, 64: 7500, 256: 12000, "prefill 8192": 55000, "prefill 131072": 20000,
    },
    "qwen3.6-27b": {1: 200, 8: 1200, 16: 1700, 64: 3600, 256: 4800, "prefill 2048": 11500},
}  # fmt: skip
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
Measured = Callable[[int, int], tuple[float, str]]


def random_checkpoint(shape_name: str, file_type: Any, skew: float = 0.0) -> Checkpoint:
    """A model in memory; layers' matrices of one shape and type share their bytes. `skew`: as of `generate_gguf`.

    Routers and biases are a layer's own, or what layers add alike would send tokens to the same experts; and a head
    that had the embedding's bytes would choose each token again.
    """
    if file_type in METHODS:
        return stored_checkpoint(shape_name, file_type)
    shape = SHAPES[shape_name]
    made: dict[Any, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    path = Path("random.gguf")
    for tensor in generate._tensors(shape, file_type, 0, skew):
        is_own = tensor.ggml_type is GGMLType.F32 or not tensor.name.startswith("blk.")
        key = tensor.name if is_own else (tensor.ggml_type, tuple(tensor.shape))
        if key not in made:
            data = np.ascontiguousarray(tensor.data() if callable(tensor.data) else tensor.data)
            made[key] = data.view(np.uint8).reshape(-1)
        tensors[tensor.name] = StoredTensor(tensor.name, tensor.ggml_type, tuple(tensor.shape), made[key], path, 0)
    return Checkpoint(path, "gguf", generate._metadata(shape, shape_name, file_type), tensors)


MODEL_TYPES = {
    "llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}  # fmt: skip
_PERIOD, _DELTA_SIZE, _TAPS = 4, 128, 4  # layers up to one with attention, a delta net's heads, its convolution
_GROUP = 128  # columns that share a scale, and of FP8 output features
_TYPES: dict[str, tuple[str, GGMLType | None]] = {
    "uint8": ("F8_E4M3", None), "uint16": ("BF16", GGMLType.BF16), "float32": ("F32", GGMLType.F32),
    "float16": ("F16", GGMLType.F16), "int32": ("I32", None), "int64": ("I64", None),
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [_GROUP, _GROUP],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": False},
    "w4a16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP,
        }}},
    },
}  # fmt: skip


def stored_checkpoint(name: str, method: str) -> Checkpoint:
    """A folder of a method, made in memory: embedding, head, norms, routers, gates of shared experts and the two small
    matrices of a delta net are in bf16. Layers' matrices of one shape have the same bytes.
    """
    made = _Maker(SHAPES[name], method)
    return Checkpoint(made.path, "safetensors", {"config": made.config()}, made.tensors(), None)


_E4M3_STD = 112  # of normal weights, the largest of a block of which is four times that, and 448 in e4m3


@cache
def normal_e4m3() -> NDArray[np.uint8]:
    """Codes of e4m3, [65536]: those nearest to the quantiles of normal weights."""
    numbers = e4m3()[:127]
    places = (np.arange(1 << 15) + 0.5) / (1 << 16) + 0.5
    quantiles = np.array([NormalDist(0, _E4M3_STD).inv_cdf(place) for place in places])
    positive = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, quantiles).astype(np.uint8)
    return np.concatenate([positive | np.uint8(0x80), positive])


class _Maker:
    def __init__(self, shape: Shape, method: str) -> None:
        self.shape, self.method, self.path = shape, method, Path(f"random_{method}")
        self.rng = np.random.default_rng(1)
        self._made: dict[tuple[int, int], dict[str, NDArray[Any]]] = {}
        self._tensors: dict[str, StoredTensor] = {}

    def is_attention(self, layer: int) -> bool:
        return not self.shape.key_heads or (layer + 1) % _PERIOD == 0

    def config(self) -> dict[str, Any]:
        shape = self.shape
        found: dict[str, Any] = {
            "model_type": MODEL_TYPES[shape.architecture], "num_hidden_layers": self.shape.num_layers,
            "max_position_embeddings": shape.context_length, "hidden_size": shape.hidden_size,
            "intermediate_size": shape.feed_forward_size, "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_size, "rms_norm_eps": shape.norm_eps,
            "vocab_size": shape.vocab_size, "hidden_act": "silu", "tie_word_embeddings": shape.tied,
            "rope_theta": shape.rope_theta,
            "quantization_config": METHODS[self.method],
        }  # fmt: skip
        if shape.num_experts:
            found |= {
                "num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token,
                "moe_intermediate_size": shape.expert_size, "norm_topk_prob": True,
            }  # fmt: skip
        if shape.key_heads:
            found |= {
                "linear_num_key_heads": shape.key_heads, "linear_num_value_heads": shape.value_heads,
                "linear_key_head_dim": _DELTA_SIZE, "linear_value_head_dim": _DELTA_SIZE,
                "linear_conv_kernel_dim": _TAPS, "full_attention_interval": _PERIOD,
            }  # fmt: skip
            if shape.num_experts:
                found["shared_expert_intermediate_size"] = shape.expert_size
        return found

    def tensors(self) -> dict[str, StoredTensor]:
        shape, hidden = self.shape, self.shape.hidden_size
        # A mixture's layers add little to its tokens, or all tokens would come to choose the same experts.
        of_tokens = self.bf16(shape.vocab_size // 32, hidden, 100 if shape.num_experts else 0.02)
        self.put("model.embed_tokens.weight", np.tile(of_tokens, (32, 1)))
        if not shape.tied:
            self.put("lm_head.weight", np.tile(self.bf16(shape.vocab_size // 32, hidden, 0.02), (32, 1)))
        self.norm("model.norm", hidden)
        for layer in range(self.shape.num_layers):
            base = f"model.layers.{layer}"
            self.norm(f"{base}.input_layernorm", hidden)
            self.norm(f"{base}.post_attention_layernorm", hidden)
            if self.is_attention(layer):
                self.attention(f"{base}.self_attn")
            else:
                self.delta_net(f"{base}.linear_attn")
            self.feed_forward(f"{base}.mlp")
        return self._tensors

    def attention(self, base: str) -> None:
        shape, hidden = self.shape, self.shape.hidden_size
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.matrix(f"{base}.q_proj", queries * (2 if shape.key_heads else 1), hidden)
        self.matrix(f"{base}.k_proj", keys, hidden)
        self.matrix(f"{base}.v_proj", keys, hidden)
        self.matrix(f"{base}.o_proj", hidden, queries)
        if shape.architecture != "llama":
            self.norm(f"{base}.q_norm", shape.head_size)
            self.norm(f"{base}.k_norm", shape.head_size)

    def delta_net(self, base: str) -> None:
        shape, hidden = self.shape, self.shape.hidden_size
        keys, values = shape.key_heads * _DELTA_SIZE, shape.value_heads * _DELTA_SIZE
        self.matrix(f"{base}.in_proj_qkv", 2 * keys + values, hidden)
        self.matrix(f"{base}.in_proj_z", values, hidden)
        self.matrix(f"{base}.out_proj", hidden, values)
        for name in "ba":
            self.put(f"{base}.in_proj_{name}.weight", self.bf16(shape.value_heads, hidden, 0.02))
        self.put(f"{base}.conv1d.weight", self.bf16(2 * keys + values, _TAPS, 0.4)[:, None])
        self.put(f"{base}.dt_bias", np.zeros(shape.value_heads, np.float32))
        self.put(f"{base}.A_log", np.log(self.rng.uniform(1, 16, shape.value_heads)).astype(np.float32))
        self.put(f"{base}.norm.weight", np.ones(_DELTA_SIZE, np.float32))

    def feed_forward(self, base: str) -> None:
        shape = self.shape
        if not shape.num_experts:
            self.gated(base, shape.feed_forward_size)
            return
        self.put(f"{base}.gate.weight", self.bf16(shape.num_experts, shape.hidden_size, shape.hidden_size**-0.5))
        for expert in range(shape.num_experts):
            self.gated(f"{base}.experts.{expert}", shape.expert_size)
        if shape.key_heads:
            self.gated(f"{base}.shared_expert", shape.expert_size)
            self.put(f"{base}.shared_expert_gate.weight", self.bf16(1, shape.hidden_size, 0.02))

    def gated(self, base: str, width: int) -> None:
        self.matrix(f"{base}.gate_proj", width, self.shape.hidden_size)
        self.matrix(f"{base}.up_proj", width, self.shape.hidden_size)
        self.matrix(f"{base}.down_proj", self.shape.hidden_size, width)

    def norm(self, name: str, size: int) -> None:
        self.put(f"{name}.weight", np.full(size, 0.0 if self.shape.key_heads else 1.0, np.float32))

    def matrix(self, name: str, out_features: int, in_features: int) -> None:
        size = out_features, in_features
        if size not in self._made:
            self._made[size] = self.fp8(*size) if self.method == "fp8" else self.four_bits(*size)
        for suffix, data in self._made[size].items():
            self.put(f"{name}.{suffix}", data)

    def fp8(self, out_features: int, in_features: int) -> dict[str, NDArray[Any]]:
        codes = normal_e4m3()[self.rng.integers(0, 1 << 16, (out_features, in_features), np.uint16)]
        scales = self.scales(-(-out_features // _GROUP), -(-in_features // _GROUP), _E4M3_STD * in_features**0.5)
        return {"weight": codes, "weight_scale_inv": scales}

    def four_bits(self, out_features: int, in_features: int) -> dict[str, NDArray[Any]]:
        """Codes around 8, where AWQ's and GPTQ's zeros are all 8."""
        shapes = {
            "awq": (in_features, out_features // 8), "gptq": (in_features // 8, out_features),
            "w4a16": (out_features, in_features // 8),
        }  # fmt: skip
        shape = shapes[self.method]
        words = self.rng.integers(-(1 << 31), 1 << 31, shape, np.int64).astype(np.int32)
        scales = self.scales(out_features, in_features // _GROUP, 5 * in_features**0.5).astype(np.float16)
        if self.method == "w4a16":
            sizes = np.array([out_features, in_features])
            return {"weight_packed": words, "weight_scale": scales, "weight_shape": sizes}
        zero = 0x88888888 if self.method == "awq" else 0x77777777  # which GPTQ stores less one
        zeros = np.full((in_features // _GROUP, out_features // 8), zero, np.uint32).view(np.int32)
        return {"qweight": words, "qzeros": zeros, "scales": np.ascontiguousarray(scales.T)}

    def scales(self, rows: int, columns: int, divisor: float) -> NDArray[np.float32]:
        return (self.rng.uniform(0.5, 1.5, (rows, columns)) / divisor).astype(np.float32)

    def bf16(self, rows: int, cols: int, deviation: float) -> NDArray[np.uint16]:
        values = self.rng.standard_normal((rows, cols), np.float32) * np.float32(deviation)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def put(self, name: str, data: NDArray[Any]) -> None:
        dtype, ggml_type = _TYPES[str(data.dtype)]
        stored = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self._tensors[name] = StoredTensor(
            name, ggml_type, data.shape, stored, self.path / "model.safetensors", 0, dtype
        )


def decodes(capacity: Capacity, rows: int, context: int) -> ForwardInput:
    """A step in which each row computes the last token of its context."""
    block_size, per_row = capacity.block_size, -(-context // capacity.block_size)
    tables = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row) % capacity.num_blocks[0]
    slots = tables[:, -1] * block_size + (context - 1) % block_size
    return ForwardInput(
        columns=StepRows.of_decodes(
            np.arange(rows), np.arange(rows), np.full(rows, context - 1, np.int32), 5 + np.arange(rows, dtype=np.int32)
        ),
        positions=np.full(rows, context - 1, np.int32),
        slot_mapping=(slots.astype(np.int32),),
        block_tables=(tables,),
    )


def check_graph(backend: CUDABackend, rows: int) -> None:
    """Logits of a step of decodes, from its graph and launch by launch, over the same cache."""
    found = []
    for replay in (True, False):
        for row in range(rows):
            backend.open(OpenedRow(row, row, SamplingParams(temperature=0), (1,), 1, 0))
        graphs = backend.model.graphs._graphs
        if not replay:
            backend.model.graphs._graphs = {}
        backend.submit(decodes(backend.capacity(), rows, 1)).result()
        backend.model.graphs._graphs = graphs
        found.append(backend.model.space.logits[:rows].clone())
        for row in range(rows):
            backend.close(row)
    assert torch.isfinite(found[0]).all(), "logits are not finite"
    assert torch.equal(found[0], found[1]), f"{rows} rows: the graph's logits differ from the launches'"


@contextmanager
def timed_results(waits: list[float]) -> Iterator[None]:
    """Within, `waits` gets the seconds that each step's result took to come."""
    result = CUDAStep.result

    def timed(self: CUDAStep) -> StepOutput:
        started = time.perf_counter()
        try:
            return result(self)
        finally:
            waits.append(time.perf_counter() - started)

    CUDAStep.result = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        CUDAStep.result = result  # type: ignore[method-assign]


def profile(core: EngineCore, batch: int, prompt: int, gen: int, sampling: SamplingParams) -> None:
    """Device time by kernel over some steps, of decodes alone where any are asked for, and how long the host waited.

    `exposed` is from the end of all kernels before it to its own end.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    waits: list[float] = []
    with torch_profile(activities=[ProfilerActivity.CUDA]) as recorded, timed_results(waits):
        measure(core, batch=batch, prompt_tokens=prompt, gen_tokens=gen, sampling=sampling)
    events = recorded.profiler.kineto_results.events()
    runs = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.device_type() == DeviceType.CUDA
    )
    if gen > 1:
        prompts_end = max((end for _, end, name in runs if "attend_chunk" in name), default=0)
        runs = [run for run in runs if run[0] >= prompts_end]
    exposed: dict[str, list[float]] = {}
    idle, reached = 0.0, runs[0][0]
    for start, end, name in runs:
        idle += max(0, start - reached) / 1e3
        exposed.setdefault(name, []).append(max(0, end - max(reached, start)) / 1e3)
        reached = max(reached, end)
    print(
        f"profile of batch {batch}, {prompt} + {gen} tokens: {(reached - runs[0][0]) / 1e6:.2f} ms,"
        f" {idle / 1e3:.2f} idle; for each of the last {gen} steps the host waited"
        f" {sum(waits[-gen:]) / gen * 1e3:.2f} ms"
    )
    for name, times in sorted(exposed.items(), key=lambda item: -sum(item[1]))[:24]:
        middle = sorted(times)[len(times) // 2]
        print(f"  {sum(times) / 1e3:9.2f} ms {len(times):6d} x {middle:8.2f} us  {name[:100]}")


def decode_rate(core: EngineCore, batch: int, prompt: int, sampling: SamplingParams) -> tuple[float, str]:
    """Tokens per second of 128 steps after `prompt` tokens a row, the middle one of three runs, and experts read."""
    measure(core, batch=batch, prompt_tokens=min(prompt, 128), gen_tokens=8, sampling=sampling)
    runs = [
        measure(core, batch=batch, prompt_tokens=prompt, gen_tokens=128, seed=seed, sampling=sampling)
        for seed in range(3)
    ]
    middle = sorted(runs, key=lambda run: run.decode_tokens_per_s)[1]
    if middle.experts_read is None:
        return middle.decode_tokens_per_s, ""
    _, experts = core.spec.mixtures()[0]
    chance = by_chance(experts, batch)
    return middle.decode_tokens_per_s, f"  {middle.experts_read:.1f} experts a layer, by chance {chance:.1f}"


def drafted(backend: CUDABackend, spec: ModelSpec, config: ResolvedConfig, rates: tuple[float, ...]) -> Measured:
    """Tokens per second of 256 steps after `prompt` tokens a row, with drafts that are right at drawn rates."""

    def measured(batch: int, prompt: int) -> tuple[float, str]:
        drafter = DrawnDrafts(rates)
        core = EngineCore(backend, spec, config, policy=Policy("prefill", measures_drafts=False), drafter=drafter)
        result = measure_batch(core, batch, Work(prompt, 256, (batch,), 3, rates), lambda _line: None, drafter)
        return result.decode_tokens_per_s.median, f"  {result.tokens_per_step:.2f} tokens of a step"

    return measured


@contextmanager
def without_drafts(backend: CUDABackend) -> Iterator[None]:
    """Within, the backend drafts nothing; its graphs still make what a drafter reads, a norm of a token more."""
    drafter, backend._drafter = backend._drafter, None
    try:
        yield
    finally:
        backend._drafter = drafter


@contextmanager
def packed_once() -> Iterator[None]:
    """Within, stored matrices of one shape and type, whose bytes are the same, are checked and packed once.

    Others are copies on the device.
    """
    made: dict[Any, PackedMatrix] = {}
    pack = Packer.pack

    def once(
        packer: Packer, parts: Sequence[MatrixSource], into: PackedMatrix | torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> PackedMatrix:  # fmt: skip
        first, in_place = parts[0], into.interleaved if isinstance(into, PackedMatrix) else interleaved
        key = first.layout, first.in_features, tuple(part.out_features for part in parts), in_place
        if first.layout.is_float or key not in made:
            matrix = made[key] = pack(packer, parts, into, interleaved)
            return matrix
        matrix = into if isinstance(into, PackedMatrix) else reserve(parts, packer.device, into, interleaved)
        matrix.weights.copy_(made[key].weights)
        matrix.block_scales.copy_(made[key].block_scales)
        return matrix

    def checked(sources: Iterable[MatrixSource]) -> None:
        check_finite({(source.layout, source.out_features, source.in_features): source for source in sources}.values())

    with (
        patch.object(Packer, "pack", once),
        patch("realizar.backends.cuda.weights.experts.check_finite", checked),
        patch("realizar.backends.cuda.weights.load.check_finite", checked),
    ):
        yield


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument(
        "--type", help="fp8, awq, gptq, w4a16, or by default that of the files that people run: q4_k_m or mxfp4"
    )
    parser.add_argument("--batches", default="1,8,16,64,256")
    parser.add_argument("--prefill", default="2048", help="lengths of prompts with commas between; 0 for none")
    parser.add_argument("--step-tokens", type=int, default=0, help="tokens of a step; 0 reads each prompt in one")
    parser.add_argument("--context", type=int, default=0, help="tokens before the batch-1 decode")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--prompt-dtype", default="auto", choices=("auto", "f16", "fp8"))
    parser.add_argument("--sampled", action="store_true", help="each batch again, with temperature 0.8 and top-p 0.95")
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of the Zipf law of routers")
    parser.add_argument("--acceptance", help="each batch again with drafts of the shape's block, as of `bench`")
    parser.add_argument("--layers", type=int, default=0, help="of the model, in place of the shape's own")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.layers:
        SHAPES[arguments.shape] = replace(SHAPES[arguments.shape], num_layers=arguments.layers)
    return arguments


def main() -> int:
    arguments = parsed()
    batches = [int(text) for text in arguments.batches.split(",") if text]
    prompts = [int(text) for text in arguments.prefill.split(",") if int(text)]
    longest_prompt = max(prompts, default=0)
    file_type = arguments.type or generate.file_type_of(arguments.shape)
    checkpoint = random_checkpoint(arguments.shape, file_type, arguments.skew)
    rates = tuple(map(float, arguments.acceptance.split(","))) if arguments.acceptance else ()
    longest = max(longest_prompt, arguments.context + 256, 512) + 64
    config = EngineConfig(
        device="cuda", max_running=max([*batches, 1]),
        max_step_tokens=arguments.step_tokens or max(longest_prompt, 512),
        context_length=longest, kv_cache_dtype=arguments.kv_cache_dtype, batch_invariant=arguments.batch_invariant,
        prefix_cache=False, prompt_dtype=arguments.prompt_dtype, drafter="auto" if rates else "off",
        speculative_tokens=len(rates),
    )  # fmt: skip
    spec, resolved = resolve_model(checkpoint, config)
    backend = CUDABackend()
    started = time.perf_counter()
    with packed_once() if file_type in METHODS else nullcontext():
        backend.load(spec, checkpoint, resolved, open_drafter(checkpoint, resolved))
    print(
        f"loaded in {time.perf_counter() - started:.1f} s, {backend.capacity().weight_bytes / 1e9:.2f} GB", flush=True
    )
    with without_drafts(backend):
        for rows in {1, min(8, resolved.max_running), resolved.max_running}:
            check_graph(backend, rows)
        core = EngineCore(backend, spec, replace(resolved, speculative_tokens=0), policy=Policy("prefill"))
    results: dict[str, float] = {}
    peer, target = PEER.get(arguments.shape, {}), TARGET.get(arguments.shape, {})
    print(f"{'work':>14} {'tok/s':>10} {'ms/step':>9} {'llama.cpp':>10} {'target':>8}")
    for prompt in prompts:
        measure(core, batch=1, prompt_tokens=prompt, gen_tokens=1)
        runs = [measure(core, batch=1, prompt_tokens=prompt, gen_tokens=1, seed=s) for s in range(3)]
        best, label = sorted(run.prefill_tokens_per_s for run in runs)[1], f"prefill {prompt}"
        results[label] = best
        shown = f"{peer.get(label, math.nan):10.0f} {target.get(label, math.nan):8.0f}"
        print(f"{label:>14} {best:10.0f} {1e3 * prompt / best:9.3f} {shown}", flush=True)
        if arguments.profile:
            profile(core, 1, prompt, 1, next_tokens(spec, 1))
    with_drafts = drafted(backend, spec, resolved, rates)
    for batch, is_sampled in itertools.product(batches, (False, True) if arguments.sampled else (False,)):
        sampling = SAMPLED if is_sampled else next_tokens(spec, batch)
        prompt = arguments.context or (1 if batch == 1 else 128)
        with without_drafts(backend):
            best, experts = decode_rate(core, batch, prompt, sampling)
        label = f"sampled {batch}" if is_sampled else f"decode {batch}"
        results[label] = best
        shown = f"{peer.get(batch, math.nan):10.0f} {target.get(batch, math.nan):8.0f}" if not is_sampled else ""
        print(f"{label:>14} {best:10.0f} {1e3 * batch / best:9.3f} {shown}{experts}", flush=True)
        if rates:
            best, length = with_drafts(batch, prompt)
            results[f"drafted {batch}"] = best
            print(f"{f'drafted {batch}':>14} {best:10.0f} {'':>28}{length}", flush=True)
        if arguments.profile:
            profile(core, batch, prompt, 32, sampling)
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

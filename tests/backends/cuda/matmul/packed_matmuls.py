"""Matmuls of packed matrices on the CPU: the CUDA kernels' twins in numpy, started with the same arguments.

With them the whole backend runs under the interpreter as it does on a GPU: its formats of activations, its interleaved
matrices, and matmuls that end with an activation.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from backends.cuda import cuda_runs
from backends.cuda.layouts.activation_values import int8_activations
from backends.cuda.matmul.fp8_cases import BLOCK, GROUP, FP8Values
from backends.cuda.matmul.recorded_launches import record_launches
from realizar.backends.cuda.attention import decode as attention_decode
from realizar.backends.cuda.device import DeviceProfile, Family, interpreter_device
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.matmul.inputs import ActivationBuffer
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.weights import load as weights
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.backends.cuda.weights.pack_raw import pack_by_threads
from realizar.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT
from realizar.quantization.source import MatrixSource

TOKEN_FACTOR = 64.0  # of halves from matmuls that end with an activation

_floats: dict[int, NDArray[np.float32]] = {}  # of packed matrices, by the address of their weights


@dataclass(frozen=True, slots=True)
class PackedDevice(DeviceProfile):
    """The interpreter's device, as if it ran the CUDA matmuls."""

    @property
    def has_cuda_kernels(self) -> bool:
        return True


class HostPacker:
    """A stand-in for `Packer`."""

    def __init__(self, device: torch.device, *, repacks: bool = True) -> None: ...

    def pack(
        self, parts: Sequence[MatrixSource], into: PackedMatrix | torch.Tensor | None = None, interleaved: bool = False
    ) -> PackedMatrix:
        packed = pack_by_threads(parts, "cpu", into, interleaved=interleaved)
        floats, at = [part.dequantize() for part in parts], packed.weights.data_ptr()
        for old in [each for each in _floats if at <= each < at + packed.weights.numel()]:
            del _floats[old]  # of memory that was freed
        if packed.interleaved:
            strips = [each.reshape(-1, 64, packed.in_features) for each in floats]
            pairs = [np.stack(pair, axis=1) for pair in zip(strips[::2], strips[1::2], strict=True)]
            floats = [pair.reshape(-1, packed.in_features) for pair in pairs]
        _floats[at] = np.concatenate(floats)
        return packed


@dataclass(slots=True)
class Launches:
    """Matmuls that ran: how often each kernel, and of one after the other whether it finished a norm."""

    names: dict[str, int] = field(default_factory=dict)
    norms: list[bool] = field(default_factory=list)


class HostKernel:
    """A stand-in for `Kernel`. Splits have their own columns, chunks of 64, as the kernels have."""

    launches: Launches

    def __init__(self, _cubin: bytes, name: str, _shared_bytes: int) -> None:
        self.name = name

    def launch(
        self, _grid: tuple[int, int, int], _threads: int, arguments: Sequence[Any], sizes: str, _stream: int,
        _dependent: bool,
    ) -> None:  # fmt: skip
        names = self.launches.names
        names[self.name] = names.get(self.name, 0) + 1
        if self.name.startswith("decode_fp8"):
            _floats[arguments[3]] = _floats[arguments[0]]
            return
        if self.name.startswith("wgmma_fp8"):
            self._launch_fp8(arguments, sizes)
            return
        gated, residual = sizes.endswith("ip"), "residual" in self.name
        count = sizes.index("pppiff") // 6
        x_at, scales_at, *norm, tokens, chunks, splits, token_stride, split_stride = arguments[6 * count :][:11]
        block_tokens = int(self.name.rpartition("tokens")[2])
        if self.name.startswith("matvec"):
            x = _read_int8(x_at, scales_at, tokens, chunks * 64)
        else:
            blocks = -(-tokens // block_tokens)
            x = _read_half(x_at, scales_at, blocks, chunks, block_tokens)[:tokens]
        self.launches.norms.append(norm[1] > 0)
        if norm[1]:
            x = _finish_norm(x, *norm)
        for index in range(count):
            weights_at, _, _, out, out_features, _ = arguments[6 * index :][:6]
            matrix = _floats[weights_at]
            assert len(matrix) == out_features
            if gated:
                values = _activated(self.name, x[:, : matrix.shape[1]] @ matrix.T)
                if self.name.startswith("matvec"):
                    _write_int8(values, out, arguments[-1])
                else:
                    _write_half(values, out, arguments[-1], block_tokens)
                continue
            if residual:
                _join(x[:, : matrix.shape[1]] @ matrix.T, out, *arguments[-7:])
                continue
            for split in range(splits):
                first, end = (min(64 * (chunks * at // splits), matrix.shape[1]) for at in (split, split + 1))
                sums = x[:, first:end] @ matrix[:, first:end].T
                for token in range(tokens):
                    to = _array(out + 4 * (split * split_stride + token * token_stride), np.float32, out_features)
                    to[:] = sums[token]

    def _launch_fp8(self, arguments: Sequence[Any], sizes: str) -> None:
        own = 6 if sizes.startswith("t") else 5  # of a matrix; stored ones have a map and factors
        count = sizes.index("ppiii") // own
        x_at, scales_at, tokens, chunks, splits, token_stride, split_stride = arguments[own * count :][:7]
        x = _read_fp8(x_at, scales_at, tokens, chunks)
        self.launches.norms.append(False)
        for index in range(count):
            weights_at, *_, out, out_features, _ = arguments[own * index :][:own]
            weights_at = getattr(weights_at, "address", weights_at)
            matrix = _floats[weights_at]
            assert len(matrix) == out_features
            if sizes.endswith("ip"):
                _write_fp8(_activated(self.name, x[:, : matrix.shape[1]] @ matrix.T), out, arguments[-1])
                continue
            halves = "_halves_" in self.name
            dtype, divisor = (np.float16, HALF_FACTOR.value) if halves else (np.float32, 1.0)
            for split, token in itertools.product(range(splits), range(tokens)):
                first, end = (128 * (-(-chunks // 2) * each // splits) for each in (split, split + 1))
                sums = x[token, first : min(end, matrix.shape[1])] @ matrix[:, first:end].T
                place = out + np.dtype(dtype).itemsize * (split * split_stride + token * token_stride)
                _array(place, dtype, out_features)[:] = sums / divisor


def decoded(activations: ActivationBuffer, tokens: int, cols: int) -> NDArray[np.float32]:
    """[tokens, cols] that a matmul multiplies by, its folded norm finished."""
    addresses = activations.addresses
    if activations.format.kind == "int8":
        x = _read_int8(*addresses, tokens, activations.codes.shape[1])
    elif activations.format.kind == "fp8":
        x = FP8Values.read(activations.codes, activations.terms, tokens, cols).floats().float().numpy()
    else:
        blocks, chunks = activations.values.shape[:2]
        x = _read_half(*addresses, blocks, chunks, activations.format.block_tokens)[:tokens]
    if activations.norm is not None:
        x = _finish_norm(x, *activations.norm.arguments())
    return x[:, :cols]


def _finish_norm(
    x: NDArray[np.float32], square_sums_at: int, parts: int, inverse_width: float, eps: float
) -> NDArray[np.float32]:
    """Rows times 1 / sqrt(mean of squares + eps)."""
    square_sums = _array(square_sums_at, np.float32, len(x) * parts).reshape(len(x), parts)
    return x / np.sqrt(square_sums.sum(axis=1, keepdims=True) * np.float32(inverse_width) + np.float32(eps))


def _activated(name: str, sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """activation(gate) * up, as a kernel's name says, of sums whose columns are interleaved."""
    tokens = len(sums)
    both = torch.from_numpy(sums).reshape(tokens, -1, 2, 64)
    gate, up = both[:, :, 0].reshape(tokens, -1), both[:, :, 1].reshape(tokens, -1)
    gelu = torch.nn.functional.gelu
    if "clamped" in name:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        active, up = gate * torch.sigmoid(SWIGLU_ALPHA * gate), up + 1
    elif "relu_squared" in name:
        active = torch.relu(gate) ** 2
    elif "silu" in name:
        active = torch.nn.functional.silu(gate)
    else:
        active = gelu(gate, approximate="tanh" if "tanh" in name else "none")
    values: NDArray[np.float32] = (active * up).numpy()
    return values


def _join(
    sums: NDArray[np.float32], hidden_at: int, bias_at: int, scale: float, gain_at: int, codes_at: int, terms_at: int,
    square_sums_at: int, parts: int,
) -> None:  # fmt: skip
    """The residual-add epilogue of sums [tokens, width]."""
    tokens, width = sums.shape
    hidden = _array(hidden_at, np.float32, sums.size).reshape(sums.shape)
    hidden += np.float32(scale) * (sums + (_array(bias_at, np.float32, width) if bias_at else 0))
    if gain_at:
        _write_int8(hidden * _array(gain_at, np.float32, width), codes_at, terms_at)
        epilogue_square_sums = _array(square_sums_at, np.float32, tokens * parts).reshape(tokens, parts)
        epilogue_square_sums[:, : width // 16] = np.square(hidden).reshape(tokens, -1, 16).sum(axis=2)


def _write_int8(x: NDArray[np.float32], codes_at: int, terms_at: int) -> None:
    codes, terms = int8_activations(x)
    _array(codes_at, np.int8, codes.size)[:] = codes.reshape(-1)
    _array(terms_at, np.float32, terms.size)[:] = terms.reshape(-1)


def _write_half(x: NDArray[np.float32], out: int, scales_at: int, block_tokens: int) -> None:
    tokens, cols = x.shape
    blocks = -(-tokens // block_tokens)
    filled = np.zeros((blocks * block_tokens, cols), np.float32)
    filled[:tokens] = x / TOKEN_FACTOR
    filled[tokens:] = np.nan  # of no consequence
    split = filled.astype(np.float16).reshape(blocks, block_tokens // 8, 8, -1, 4, 4, 2, 2)
    values = np.ascontiguousarray(split.transpose(0, 3, 5, 7, 1, 2, 4, 6))  # as half_activations, no row divided
    _array(out, np.float16, values.size)[:] = values.reshape(-1)
    _array(scales_at, np.float32, blocks * block_tokens)[:] = TOKEN_FACTOR


def _read_half(at: int, scales_at: int, blocks: int, chunks: int, block_tokens: int) -> NDArray[np.float32]:
    """Rows of the `half` format as float32 [blocks * block_tokens, chunks * 64]."""
    values = _array(at, np.float16, blocks * chunks * 64 * block_tokens).astype(np.float32)
    run = min(block_tokens, 8)
    split = values.reshape(blocks, chunks, 4, 2, block_tokens // run, run, 4, 2)  # as half_activations orders them
    tokens = split.transpose(0, 4, 5, 1, 6, 2, 7, 3).reshape(blocks * block_tokens, chunks * 64)
    return tokens * _array(scales_at, np.float32, len(tokens))[:, None]


def _write_fp8(x: NDArray[np.float32], codes_at: int, scales_at: int) -> None:
    made = FP8Values.of(torch.from_numpy(x)).buffer()
    _array(codes_at, np.uint8, made.codes.numel())[:] = made.codes.numpy().reshape(-1)
    _array(scales_at, np.float32, made.terms.numel())[:] = made.terms.numpy().reshape(-1)


def _read_fp8(codes_at: int, scales_at: int, tokens: int, chunks: int) -> NDArray[np.float32]:
    """Rows of the `fp8` format as float32 [tokens, chunks * 64]."""
    blocks, groups = -(-tokens // BLOCK), -(-chunks // 2)
    codes = torch.from_numpy(_array(codes_at, np.uint8, blocks * groups * GROUP * BLOCK))
    scales = torch.from_numpy(_array(scales_at, np.float32, blocks * groups * BLOCK))
    shaped = codes.view(blocks, 2 * groups, 4, BLOCK // 8, 8, 16), scales.view(blocks, groups, BLOCK)
    floats: NDArray[np.float32] = FP8Values.read(*shaped, tokens, chunks * 64).floats().float().numpy()
    return floats


def _read_int8(codes_at: int, terms_at: int, tokens: int, cols: int) -> NDArray[np.float32]:
    codes = _array(codes_at, np.int8, tokens * cols).reshape(tokens, -1, 16)
    scales = _array(terms_at, np.float32, tokens * cols // 8).reshape(tokens, -1, 2)[..., :1]
    return (codes * scales).reshape(tokens, cols).astype(np.float32)


def _array(address: int, dtype: Any, count: int) -> NDArray[Any]:
    """Memory at an address."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def run_packed(monkeypatch: pytest.MonkeyPatch, splits: int | None = None) -> Launches:
    """Have runners pack and multiply with these twins, and return the record of launches.

    Args:
        splits: of all matmuls that have as many chunks and no activation; as tuned if None.
    """
    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 * 1024
    )

    own = interpreter_device()
    torch_samples: frozenset[Family] = frozenset({"sampling"})
    device = PackedDevice(own.torch_device, own.name, own.capability, 132, own.memory_bytes, without=torch_samples)
    monkeypatch.setattr(cuda_runs, "interpreter_device", lambda: device)
    monkeypatch.setattr(weights, "Packer", HostPacker)
    monkeypatch.setattr(attention_decode, "DecodeAttention", lambda *_: None)  # Triton's kernels take its place
    record_launches(monkeypatch, HostKernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: SimpleNamespace(cuda_stream=0))
    if splits is not None:
        choose = MatmulKernels._choose
        monkeypatch.setattr(MatmulKernels, "_choose", lambda *asked: replace(choose(*asked), splits=splits))
    HostKernel.launches = Launches()
    return HostKernel.launches

"""The CUDA kernel for attention of single tokens on the CPU: its twin in torch, started with the same arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from backends.cuda.layouts.activation_values import half_positions, int8_activations
from realizar.backends.cuda.attention import decode as attention_decode
from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.quantization.microscaling import e4m3
from reference_model import nearest_e4m3

_TENSORS = (
    "partials", "bias", "cosine", "sine", "query_scales", "query_norm", "key_norm", "query_norm_bias", "key_norm_bias",
    "keys", "values", "key_scales", "value_scales", "slots", "sinks", "partial", "state", "arrivals", "decodes",
    "tables", "table_stride", "out", "out_scale", "terms",
)  # fmt: skip
_INTEGERS = (
    "split_stride", "token_stride", "key_at", "value_at", "kv_heads", "window", "table_rows", "out_stride",
)  # fmt: skip


class DecodeTwin:
    """A stand-in for `DecodeAttention`; `launched` has the kernels, in the order of their launches."""

    launched: list[AttendKernel]

    def __init__(self, _device: torch.device, _capability: tuple[int, int]) -> None:
        self._prepared: set[AttendKernel] = set()

    def prepare(self, wanted: Iterable[AttendKernel]) -> None:
        self._prepared |= {kernel for kernel in wanted if kernel.supported}

    def ready(self, kernel: AttendKernel) -> bool:
        return kernel in self._prepared

    def launch(
        self, kernel: AttendKernel, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float], integers: Sequence[int], dependent: bool,
    ) -> None:  # fmt: skip
        self.launched.append(kernel)
        call = _Call(
            kernel, dict(zip(_TENSORS, tensors, strict=True)), *numbers, **dict(zip(_INTEGERS, integers, strict=True))
        )
        assert grid[0] == call.kv_heads
        for decode in range(grid[1]):
            call.run(decode)


class _Call:
    def __init__(
        self, kernel: AttendKernel, tensors: dict[str, torch.Tensor | None], eps: float, value_eps: float,
        scale: float, soft_cap: float, *, split_stride: int, token_stride: int, key_at: int, value_at: int,
        kv_heads: int, window: int, table_rows: int, out_stride: int,
    ) -> None:  # fmt: skip
        self.kernel, self.tensors, self.eps, self.value_eps = kernel, tensors, eps, value_eps
        self.scale, self.soft_cap = scale, soft_cap
        self.split_stride, self.token_stride, self.starts = split_stride, token_stride, (0, key_at, value_at)
        self.kv_heads, self.window, self.table_rows, self.out_stride = kv_heads, window, table_rows, out_stride

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        assert tensor is not None, name
        return tensor.view(-1)

    def run(self, decode: int) -> None:
        row, token, length, position = self["decodes"].view(-1, 4)[decode].tolist()
        if row < 0:
            return
        query, key, value = self.heads(token, position)
        slot = int(self["slots"][token])
        if not self.kernel.stored:
            self.keep(slot, key, value)
        table = (self.table_rows + row) * int(self["table_stride"][0])
        first = max(0, length - self.window) if self.window else 0
        size = self.kernel.block_size
        places = [int(self["tables"][table + i // size]) * size + i % size for i in range(first, length - 1)] + [slot]
        keys, values = (self.read(name, places) for name in ("keys", "values"))
        scores = torch.einsum("kgd,nkd->kgn", query, keys) * self.scale
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if self.tensors["sinks"] is not None:
            sinks = self["sinks"].view(self.kv_heads, -1, 1)
            weights = torch.cat([scores, sinks], dim=2).softmax(dim=2)[..., :-1]
        else:
            weights = scores.softmax(dim=2)
        self.write(token, torch.einsum("kgn,nkd->kgd", weights, values).reshape(-1))

    def heads(self, token: int, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [KV heads, group, head], key and value [KV heads, head]."""
        kernel, flat = self.kernel, self["partials"]
        found, others = [], 0 if kernel.stored else self.kv_heads
        for start, count in zip(self.starts, (self.kv_heads * kernel.group, others, others), strict=True):
            columns = slice(start, start + count * kernel.head)
            at = token * self.token_stride
            x = sum(flat[split * self.split_stride + at :][columns].clone() for split in range(kernel.splits))
            found.append((x + self["bias"][columns] if kernel.bias else x).view(count, kernel.head))  # type: ignore[union-attr]
        query = self.rotate(found[0], position, "query_norm").view(self.kv_heads, kernel.group, kernel.head)
        if kernel.growth:
            query = query * self["query_scales"][position]
        value = found[2]
        if kernel.value_norm:
            value = value / (value.square().mean(dim=1, keepdim=True) + self.value_eps).sqrt()
        return query, self.rotate(found[1], position, "key_norm"), value

    def rotate(self, x: torch.Tensor, position: int, norm: str) -> torch.Tensor:
        kernel = self.kernel
        if kernel.norm:
            x = x - x.mean(dim=1, keepdim=True) if kernel.norm == 2 else x
            x = x / (x.square().mean(dim=1, keepdim=True) + self.eps).sqrt() * self[norm]
            x = x + self[f"{norm}_bias"] if kernel.norm_bias else x
        half = kernel.rotary // 2
        if not half:
            return x
        angles = slice(position * half, (position + 1) * half)
        cosine, sine = self["cosine"][angles], self["sine"][angles]
        first = slice(0, 2 * half, 2) if kernel.interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if kernel.interleaved else slice(half, 2 * half)
        rotated = x.clone()
        rotated[:, first] = x[:, first] * cosine - x[:, second] * sine
        rotated[:, second] = x[:, second] * cosine + x[:, first] * sine
        return rotated

    def cached(self, name: str) -> torch.Tensor:
        """[blocks, KV heads, block size, values of a place]."""
        each = -(-self.kernel.head // 32) if name.endswith("scales") else self.kernel.head
        return self[name].view(-1, self.kv_heads, self.kernel.block_size, each)

    def keep(self, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
        block, place = divmod(slot, self.kernel.block_size)
        for name, x in (("keys", key), ("values", value)):
            if self.kernel.element == "int8":
                groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(self.kv_heads, -1, 32)
                scales = (groups.abs().amax(dim=2) / 127).half()
                self.cached(f"{name[:-1]}_scales")[block, :, place] = scales
                wide = torch.where(scales > 0, scales, 1).float()[..., None]
                x = (groups / wide).round().clamp(-127, 127).flatten(1)[:, : x.shape[1]]
            elif self.kernel.element == "fp8":
                x = torch.from_numpy(nearest_e4m3((x / self[f"{name[:-1]}_scales"]).numpy()))
            self.cached(name)[block, :, place] = x.to(self.cached(name).dtype)

    def read(self, name: str, places: list[int]) -> torch.Tensor:
        """float32 [places, KV heads, head]."""
        blocks, within = (torch.tensor(places) // self.kernel.block_size, torch.tensor(places) % self.kernel.block_size)
        found = self.cached(name)[blocks, :, within]
        if self.kernel.element == "fp8":
            return torch.from_numpy(e4m3()[found.numpy()]) * self[f"{name[:-1]}_scales"]
        found = found.float()
        if self.kernel.element == "int8":
            scales = self.cached(f"{name[:-1]}_scales")[blocks, :, within].float()
            found = found * scales.repeat_interleave(32, dim=2)[..., : self.kernel.head]
        return found

    def write(self, token: int, x: torch.Tensor) -> None:
        kernel, cols = self.kernel, x.numel()
        if kernel.out == "f32":
            self["out"][token * self.out_stride :][:cols] = x
        elif kernel.out == "int8":
            codes, terms = int8_activations(x[None].numpy())
            self["out"][token * codes.size :][: codes.size] = torch.from_numpy(codes[0])
            self["terms"][token * terms.size :][: terms.size] = torch.from_numpy(terms.reshape(-1))
        else:
            block, row = divmod(token, kernel.block_tokens)
            column, core = np.arange(cols), half_positions(cols)
            chunk = (block * math.ceil(cols / 64) + column // 64) * 8 + core[:, 0]
            at = ((chunk * (kernel.block_tokens // 8) + row // 8) * 8 + row % 8) * 8 + core[:, 1]
            self["out"][torch.from_numpy(at)] = x.half()
            self["out_scale"][token] = 1.0


def attend_by_twin(monkeypatch: pytest.MonkeyPatch) -> list[AttendKernel]:
    """Have runners attend to single tokens with this twin, and return the list in which launches are noted."""
    monkeypatch.setattr(attention_decode, "DecodeAttention", DecodeTwin)
    DecodeTwin.launched = []
    return DecodeTwin.launched

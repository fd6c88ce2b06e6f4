"""Times the grouped matmuls over experts on a GPU, in graphs: `python scripts/cuda_experts.py --rows 16,64,256,2048`.

Weights are random bytes in fragment order, of several layers, so that none stays in a cache. Beside each time stand the
bytes of the experts that were chosen and the rate of the products. With `--fp8` they are in 8-bit floats, whatever the
rows, and weights are decoded before each matmul, but those of `--gate-up E4M3 --down E4M3`, which are stored so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from realizar.backends.cuda.matmul.fp8 import FP8_ROWS
from realizar.backends.cuda.matmul.grouped import GroupedConfig, GroupedMatmuls
from realizar.backends.cuda.matmul.grouped_tiles import FP8_PLACES
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat, make_buffer
from realizar.backends.cuda.matmul.quantized import MatmulKernels
from realizar.backends.cuda.matmul.tuning_table import ExpertShape
from realizar.backends.cuda.native.grouped.source import DirectTiles, GroupedTiles
from realizar.backends.cuda.tuning.measure import buffers_of, random_choices, random_experts, step_of
from realizar.backends.cuda.weights.experts import PackedExperts
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.ggml_layouts import GGML_LAYOUTS


def milliseconds(run: Callable[[], None], layers: int) -> float:
    """Milliseconds of a layer: the median of nine replays of a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[1:])[4] / layers


class Layers:
    """Layers of random experts, a step's rows and their choices."""

    def __init__(self, rows: int, tokens: int, options: argparse.Namespace) -> None:
        self.matmuls = MatmulKernels("cuda")
        self.grouped = GroupedMatmuls(self.matmuls)
        self.rows, self.experts, self.per_token, self.count = rows, options.experts, options.per_token, options.layers
        shape = ExpertShape(self.experts, options.hidden, options.width)
        self.step = self.grouped.step(rows, self.per_token, shape)
        if tokens or options.fp8:
            self.step = step_of(self.step.pairs, self.experts, FP8_PLACES if options.fp8 else tokens)
        self.step = replace(self.step, in_fp8=options.fp8)
        sizes = (
            (2 * options.width, options.hidden, options.gate_up),
            (options.hidden, options.width, options.down),
        )
        self.gate_ups, self.downs = ([random_stack(self.experts, *each) for _ in range(self.count)] for each in sizes)
        self.chosen = random_choices(rows, self.per_token, self.experts, self.count, options.skew)
        x = torch.randn(rows, options.hidden, device="cuda")
        formats = (InputFormat("half", block) for block in (64 if rows >= 64 else 16, 1))
        self.x, self.x_laid = (self.matmuls.written(x, each) for each in formats)
        if options.fp8:
            self.x_laid = random_fp8(rows, options.hidden)
        self.buffers = buffers_of(self.step, self.experts, options.width, options.hidden)
        self.out = torch.zeros(self.step.pairs, options.hidden, device="cuda")
        self.weights = torch.rand(self.step.pairs, device="cuda")
        first = self.grouped.route(self.step, self.gate_ups[0], "silu")
        second = self.grouped.route(self.step, self.downs[0], tiled=True)
        self.gates = [first, *other_tiles(first, options.tiles)]
        self.ends = [second, *other_tiles(second, options.tiles)]
        self.grouped.prepare([*self.gates, *self.ends], self.experts)

    def sort(self, layer: int) -> None:
        self.grouped.sort(self.chosen[layer], self.step, self.experts, self.buffers)

    def gate_up(self, config: GroupedConfig, layer: int) -> None:
        stack = self.gate_ups[layer]
        x = self.x_laid if config.lays else self.x
        self.grouped.launch_gated(stack, x, self.per_token, self.step, self.buffers, config)

    def down(self, config: GroupedConfig, layer: int) -> None:
        stack = self.downs[layer]
        self.grouped.launch_pairs(stack, None, 1, self.step, self.buffers, config, self.out, self.weights)

    def dense(self, stacks: list[PackedExperts]) -> Callable[[int], None]:
        """A matmul of the same bytes as one matrix, of as many tokens as a tile has places."""
        tokens, out_features = self.step.tokens, stacks[0].count * stacks[0].out_features
        source = self.matmuls.written(
            torch.randn(tokens, stacks[0].in_features, device="cuda"), InputFormat("half", tokens)
        )
        matrices = [
            PackedMatrix(out_features, s.in_features, s.format, s.weights, s.block_scales, s.table) for s in stacks
        ]
        config = self.matmuls.route(tokens, matrices[0])
        partials = torch.empty(config.splits, tokens, out_features, device="cuda")
        return lambda layer: self.matmuls.launch(matrices[layer], source, partials, tokens, config)

    def time(self, name: str, stacks: list[PackedExperts], *kernels: Callable[[int], None]) -> None:
        """Print the time of kernels that follow each other, and what they read and compute."""

        def run() -> None:
            for layer in range(self.count):
                for kernel in kernels:
                    kernel(layer)

        ms = milliseconds(run, self.count)
        used = float(np.mean([len(each.unique()) for each in self.chosen]))
        read = sum(each.stride for each in stacks) * used / 1e6
        flops = sum(2.0 * self.step.pairs * each.out_features * each.in_features for each in stacks)
        rates = f"{read:7.1f} MB {read / ms / 1e3:6.2f} TB/s {flops / ms / 1e9:6.1f} TFLOP/s" if stacks else ""
        head = f"rows {self.rows:5d} places {self.step.tokens:3d}"
        print(f"{head} {name:32s} {ms * 1e3:8.2f} us {rates}", flush=True)


def random_stack(count: int, out_features: int, cols: int, name: str) -> PackedExperts:
    """Of a type by name; all scales of `E4M3` are 1, so that no weight is decoded."""
    if name != "E4M3":
        return random_experts(count, out_features, cols, GGML_LAYOUTS[GGMLType[name]])
    made = random_experts(count, out_features, cols, e4m3_layout(128))
    block, codes = made.format.block_bytes // 2, made.format.codes_bytes // 2
    made.weights.view(torch.float16).view(-1, block)[:, codes:] = 1.0
    return made


def random_fp8(rows: int, cols: int) -> ActivationBuffer:
    made = make_buffer(FP8_ROWS, cols, rows, torch.device("cuda"))
    values = torch.randn(made.codes.shape, device="cuda")
    made.codes.copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
    made.terms.fill_(0.01)
    return made


def other_tiles(config: GroupedConfig, text: str) -> Iterator[GroupedConfig]:
    """Tiles that the command line asks to be tried; the first letter says for which matmul, capitals mean direct."""
    own = "gl" if config.activation else "d"
    for part in text.split(",") if text else ():
        numbers = list(map(int, part[1:].split("/")))
        if part[0].lower() in own and numbers[0] == config.tiles.tokens:
            tokens, first, second, third, blocks = numbers
            if part[0].isupper():
                yield replace(config, tiles=DirectTiles(tokens, first, second, third, blocks))
            else:
                yield replace(config, tiles=GroupedTiles("wgmma", tokens, first, second, third, blocks, part[0] == "l"))


def numbers_of(config: GroupedConfig) -> str:
    names = [field.name for field in fields(config.tiles) if field.name not in ("kind", "tokens")]
    return config.tiles.kind + " " + "/".join(str(getattr(config.tiles, name)) for name in names)


def main() -> None:
    """Time each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="16,64,256,2048")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--gate-up", default="Q4_K")
    parser.add_argument("--down", default="Q6_K")
    parser.add_argument("--dense", action="store_true", help="time dense matmuls of as many bytes too")
    parser.add_argument("--fp8", action="store_true", help="in 8-bit floats, of any number of rows")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--tokens", default="0", help="numbers of places of a tile; 0: by the rows")
    parser.add_argument(
        "--tiles",
        default="",
        help="g, l (gate and up of laid rows) or d, then tokens/strips/groups/stages/blocks; G or D, then"
        " tokens/slots/parts/unroll/blocks; ...",
    )
    options = parser.parse_args()
    for rows in map(int, options.rows.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            time_rows(Layers(rows, tokens, options), options.dense)


def time_rows(layers: Layers, dense: bool) -> None:
    """Print the times of a step."""
    gate_up, down = layers.gate_ups[0], layers.downs[0]
    tiles = [int((-(-each.flatten().bincount() // layers.step.tokens)).sum()) for each in layers.chosen]
    used = np.mean([len(each.unique()) for each in layers.chosen])
    print(f"rows {layers.rows}: {used:.1f} experts, {np.mean(tiles):.1f} tiles")
    layers.time("sort", [], layers.sort)
    for config in layers.gates:
        layers.time(f"sort, gate and up {numbers_of(config)}", [gate_up], layers.sort, partial(layers.gate_up, config))
    for config in layers.ends:
        layers.time(f"down {numbers_of(config)}", [down], partial(layers.down, config))
    ends = partial(layers.gate_up, layers.gates[0]), partial(layers.down, layers.ends[0])
    layers.time("all", [gate_up, down], layers.sort, *ends)
    if dense:
        for name, stacks in (("gate and up", layers.gate_ups), ("down", layers.downs)):
            layers.time(f"dense {name}, all experts", [], layers.dense(stacks))


if __name__ == "__main__":
    main()

"""Times the kernels of a gated delta net on a GPU, and prints their errors beside a float64 recurrence: a script.

    PYTHONPATH=tests python -m backends.cuda.recurrences.time_delta_net --key-heads 16 --value-heads 32 --size 128

One layer: decodes of several numbers of rows, and a chunk of a prompt by matrix units (each precision, and on Hopper
the kernels in CUDA C++) and token by token, all by turns. Bytes are those of the states, read and written once; a share
is of the card's measured copy speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from backends.cuda.recurrences.delta_cases import Net
from backends.cuda.recurrences.delta_launches import HOPPER, Kernels, Row
from realizar.backends.cuda.native.scans.source import SCAN_HEAD

_RUNS = 10


def seconds(run: Callable[[], object], repeats: int = 9) -> float:
    """The median time of a run on the device, of ten after another each: the host starts one while others run."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _RUNS)
    return float(np.median(times))


def start_all(runs: Iterable[Callable[[], object]]) -> None:
    for run in runs:
        run()


def recurrence(net: Net, inputs: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state in float64, on the device."""
    kernel, bias, rate = (torch.from_numpy(each).double().cuda() for each in net.vectors())
    x = torch.from_numpy(inputs).double().cuda()
    tokens, past = len(x), net.length - 1
    padded = torch.cat([torch.zeros(past, net.width, device="cuda", dtype=torch.float64), x])
    mixed = sum(padded[j : j + tokens, : net.channels] * kernel[:, j] for j in range(net.length))
    mixed = mixed * torch.sigmoid(mixed)
    size = net.key_heads * net.key
    q, k = (mixed[:, at : at + size].view(tokens, net.key_heads, -1) for at in (0, size))
    q, k = (a / torch.sqrt((a * a).sum(-1, keepdim=True) + 1e-6) for a in (q, k))
    ratio = net.value_heads // net.key_heads
    q, k = (a.repeat(1, ratio, 1) if net.tiled else a.repeat_interleave(ratio, 1) for a in (q, k))
    v = mixed[:, 2 * size :].view(tokens, net.value_heads, -1)
    beta = torch.sigmoid(x[:, -2 * net.value_heads : -net.value_heads])
    decay = torch.exp(rate * torch.nn.functional.softplus(x[:, -net.value_heads :] + bias))
    state = torch.zeros(net.value_heads, net.key, net.value, device="cuda", dtype=torch.float64)
    outputs = torch.empty_like(v)
    for t in range(tokens):
        state = state * decay[t, :, None, None]
        lacking = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t, :, :, None] * lacking[:, None, :]
        outputs[t] = torch.einsum("hk,hkv->hv", q[t] * net.key**-0.5, state)
    return outputs.reshape(tokens, -1), state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    net = Net(arguments.key_heads, arguments.value_heads, arguments.size, arguments.size, tiled=True)
    write = sys.stdout.write
    inputs = net.inputs(arguments.tokens, 1)
    outputs, state = recurrence(net, inputs)
    hopper = [HOPPER] if torch.cuda.get_device_capability() == (9, 0) and arguments.size == SCAN_HEAD else []
    by_name = {name: Kernels(net, "cuda", name, slots=2) for name in (*hopper, "tf32", "tf32x3", "ieee")}
    for name, kernels in by_name.items():
        (found,) = kernels.step([Row(0, inputs, 0, scanned=name != "ieee")])
        error = np.abs(found - outputs.cpu().numpy()).max() / float(outputs.abs().max())
        of_state = float((kernels.states[0] - state).abs().max() / state.abs().max())
        label = f"{arguments.tokens} tokens {'token by token' if name == 'ieee' else name}"
        write(f"{label}: error {error:.1e}, of state {of_state:.1e}\n")
    for turn in range(2):
        for name, kernels in by_name.items():
            scans = [run for part, run in kernels.launches.items() if part.startswith("scan_")]
            taken = {part: f"{seconds(run) * 1e6:.1f} us" for part, run in kernels.launches.items()}
            together = f", scan {seconds(partial(start_all, scans)) * 1e6:.1f} us" if scans else ""
            write(f"turn {turn}, {name}: {taken}{together}\n")
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))
    for rows in arguments.rows:
        kernels = Kernels(net, "cuda", slots=rows)
        kernels.step([Row(slot, net.inputs(1, slot), 5) for slot in range(rows)])
        parts = {part: seconds(run) for part, run in kernels.launches.items()}
        size = 2 * kernels.states[0].numel() * 4 * rows
        shown = {part: f"{time * 1e6:.1f} us" for part, time in parts.items()}
        write(f"{rows} rows: {shown}; states {size / 1e6:.1f} MB, {size / copied / parts['recur']:.0%} of copy speed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

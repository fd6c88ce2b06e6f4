"""Checks of the kernels of gated delta nets, on the CPU under the interpreter and on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from backends.cuda.recurrences.delta_cases import Net
from backends.cuda.recurrences.delta_launches import HOPPER, NORM_EPS, Kernels, Row
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded

GROUPED, TILED, SHORT = Net(2, 4, 16, 32), Net(1, 3, 32, 16, tiled=True), Net(2, 2, 16, 16, length=3)
UNEVEN, UNEVEN_WIDE = Net(2, 4, 8, 24, length=3), Net(1, 3, 48, 96, tiled=True)
ALONE = Net(1, 1, 16, 16)
WIDE = Net(16, 32, 128, 128, tiled=True)


def close(found: np.ndarray, expected: np.ndarray, limit: float = 2e-5) -> None:
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


def check_decodes(net: Net, device: str, splits: int) -> None:
    """Each row goes on from its own state; what is uncertain is computed again from the ring, or overwritten."""
    kernels = Kernels(net, device, splits=splits)
    inputs = {slot: net.inputs(20, slot) for slot in (3, 1)}
    expected = {slot: net.run(each)[0] for slot, each in inputs.items()}
    known = {3: 0, 1: 0}  # tokens that the state has seen
    done = {3: 0, 1: 0}
    for counts, uncertain, refused in (((3, 1), 0, 0), ((4, 3), 2, 1), ((1, 2), 1, 1), ((2, 1), 0, 0)):
        rows = []
        for slot, count in zip(inputs, counts, strict=True):
            part = inputs[slot][done[slot] : done[slot] + count]
            rows.append(Row(slot, part, done[slot], done[slot] - known[slot], uncertain))
        for row, found in zip(rows, kernels.step(rows), strict=True):
            close(found, expected[row.slot][row.position : row.position + len(row.inputs)])
            known[row.slot] = row.position + len(row.inputs) - uncertain
            done[row.slot] = row.position + len(row.inputs) - refused
        for slot in known:
            close(kernels.states[slot].cpu().numpy(), net.run(inputs[slot][: known[slot]])[1])
    assert torch.isnan(kernels.states[0]).all()  # nobody's


def gated(net: Net, outputs: np.ndarray, inputs: np.ndarray, norm: float) -> np.ndarray:
    """Outputs after norm and gate, in float64."""
    gate = inputs[:, net.channels : net.channels + outputs.shape[1]].astype(np.float64)
    heads = outputs.reshape(len(outputs), net.value_heads, net.value)
    heads = norm * heads / np.sqrt((heads * heads).mean(-1, keepdims=True) + NORM_EPS)
    return heads.reshape(outputs.shape) * gate / (1 + np.exp(-gate))


def check_once(
    net: Net, device: str, splits: int, columns: int, norm: float = 1.0, undone: int = 3, precision: str = "ieee"
) -> None:
    """One token a row: after chunks whose last tokens are uncertain, deferred once, and then one after the other.

    norm: its weight; small values need a divisor in float16. undone: the most tokens that a step computes again, of
    which the first needs the earliest token that the ring has.
    """
    kernels = Kernels(net, device, precision, splits=splits, columns=columns, undone=undone)
    kernels.norm = norm
    is_gated = kernels.columns == net.value
    inputs = {slot: net.inputs(12, slot) for slot in (3, 1)}
    expected = {slot: net.run(each)[0] for slot, each in inputs.items()}
    kernels.step([Row(slot, inputs[slot][:6], 0, uncertain=undone) for slot in inputs])
    known = 6 - undone
    for at, uncertain in ((6, 1), (6, 1), (6, 0), (7, 0), (8, 1), (9, 0), (10, 0), (11, 0)):
        rows = [Row(slot, each[at : at + 1], at, at - known, uncertain) for slot, each in inputs.items()]
        found = kernels.once(rows, "f16" if norm < 1.0 else "f32")
        known = at + 1 - uncertain
        for row, own in zip(rows, found, strict=True):
            right = expected[row.slot][at : at + 1]
            right = gated(net, right, row.inputs, norm) if is_gated else right
            close(own[None], right, 1e-3 if is_gated and (norm < 1.0 or precision == HOPPER) else 2e-5)
            close(kernels.states[row.slot].cpu().numpy(), net.run(inputs[row.slot][:known])[1])
    places = [at % kernels.ring for at in range(12 - net.length, 12)]
    for slot, each in inputs.items():
        assert (kernels.rings[slot, places].cpu().numpy() == net.kept(each)[-net.length :]).all() or splits > 1
        close(kernels.rings[slot, places].cpu().numpy(), net.kept(each)[-net.length :])
    assert torch.isnan(kernels.states[0]).all()  # nobody's
    assert torch.isnan(kernels.rings[0]).all()


def check_first(net: Net, device: str, splits: int, precision: str = "ieee") -> None:
    """A row's first tokens one by one, each deferred once, while state and ring have nothing yet that may be read."""
    kernels = Kernels(net, device, precision, splits=splits, columns=padded(net.value) // 2, undone=2)
    inputs = net.inputs(6, 3)
    expected = net.run(inputs)[0]
    for at in range(len(inputs)):
        for uncertain in (1, 1, 0):  # the token before is certain by now
            found = kernels.once([Row(2, inputs[at : at + 1], at, 0, uncertain)])
            close(found, expected[at : at + 1])
        close(kernels.states[2].cpu().numpy(), net.run(inputs[: at + 1])[1])
    kernels = Kernels(net, device, precision, splits=splits, columns=padded(net.value) // 2, undone=2)
    for at, replayed in ((0, 0), (1, 1), (2, 1)):  # uncertain ones, replayed by the token after
        found = kernels.once([Row(2, inputs[at : at + 1], at, replayed, 1)])
        close(found, expected[at : at + 1])
    close(kernels.states[2].cpu().numpy(), net.run(inputs[:2])[1])


def check_scans(
    net: Net, device: str, sizes: tuple[int, int], uncertain: int, limit: float = 2e-5, precision: str = "ieee"
) -> None:
    """A long chunk beside a short one, then another, whose last token may be uncertain and computed again.

    precision: of products; with tf32 what tiles leave for the states is float16.
    """
    kernels = Kernels(net, device, precision)
    long, short = net.inputs(sum(sizes) + 2, 1), net.inputs(4, 2)
    done = 0
    for size, left in zip(sizes, (0, uncertain), strict=True):
        row = Row(2, long[done : done + size], done, uncertain=left, scanned=True)
        decode = Row(0, short[: size % 3 + 1], 0)
        first, second = kernels.step([decode, row])
        close(second, net.run(long[: done + size])[0][done:], limit)
        close(first, net.run(decode.inputs)[0])
        done += size
        close(kernels.states[2].cpu().numpy(), net.run(long[: done - left])[1], limit)
    if uncertain:
        (found,) = kernels.step([Row(2, long[done - 1 : done + 2], done - 1)])
        close(found, net.run(long[: done + 2])[0][done - 1 :], limit)


def check_alike(device: str, limit: float, precision: str, net: Net = ALONE) -> None:
    """Keys that are all alike: powers of such links would be beyond all bounds."""
    inputs = np.repeat(net.inputs(1, 5), 130, axis=0)
    inputs[:, -2 * net.value_heads : -net.value_heads] = 8.0  # betas near 1
    inputs[:, -net.value_heads :] = -20.0  # decays near 1
    (found,) = Kernels(net, device, precision).step([Row(0, inputs, 0, scanned=True)])
    close(found, net.run(inputs)[0], limit)


def check_rows(net: Net, device: str, rows: tuple[tuple[int, int, int], ...], limit: float, precision: str) -> None:
    """Rows of a step side by side: tokens before the chunk, its own, and those of them that are uncertain.

    What comes before lies in a ring and in a state, as float64 has it; slots of nobody stay poisoned.
    """
    kernels = Kernels(net, device, precision, splits=2, slots=len(rows) + 1)
    step, expected = [], []
    for index, (past, count, uncertain) in enumerate(rows):
        inputs, slot = net.inputs(past + count, 100 + index), index + 1
        for at in range(max(past - kernels.ring, 0), past):
            kernels.rings[slot, at % kernels.ring] = torch.from_numpy(net.kept(inputs[at : at + 1])[0]).to(device)
        if past:
            kernels.states[slot] = torch.from_numpy(net.run(inputs[:past])[1]).float().to(device)
        step.append(Row(slot, inputs[past:], past, uncertain=uncertain, scanned=count > 1))
        expected.append((net.run(inputs)[0][past:], net.run(inputs[: past + count - uncertain])[1]))
    for row, found, (outputs, state) in zip(step, kernels.step(step), expected, strict=True):
        close(found, outputs, limit)
        close(kernels.states[row.slot].cpu().numpy(), state, limit)
    assert torch.isnan(kernels.states[0]).all()


def check_decays(device: str, limit: float, precision: str) -> None:
    """Decays of nearly one and of nearly nothing, side by side."""
    net = Net(2, 4, 128, 128, seed=7)
    inputs = net.inputs(200, 3)
    inputs[:, -4:-2] = -25.0
    inputs[:, -2:] = 60.0
    (found,) = Kernels(net, device, precision).step([Row(0, inputs, 0, scanned=True)])
    close(found, net.run(inputs)[0], limit)

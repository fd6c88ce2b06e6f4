"""The kernels of the gated delta net against the reference model in float64, and against themselves in other steps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu.kernels.delta_harness import (
    DeltaNetKernels,
    delta_net,
    random_inputs,
    random_vectors,
    reference,
)
from realizar.backends.cpu.codegen.recurrence import head_lanes, run_columns
from wider import wider

Array = NDArray[np.float32]


def in_chunks(kernels: DeltaNetKernels, inputs: Array, size: int) -> Array:
    """Outputs of one row that reads its tokens in chunks."""
    starts = range(0, len(inputs), size)
    return np.concatenate([kernels.step([(0, start, inputs[start : start + size])]) for start in starts])


@pytest.mark.parametrize(
    ("key_heads", "ratio", "key_size", "value_size", "tiled"),
    [
        (2, 1, 16, 16, False), (2, 2, 16, 16, True), (2, 3, 16, 32, False), (3, 3, 32, 16, True), (1, 2, 64, 64, False),
        (2, 2, 128, 128, True), (1, 3, 128, 64, False),
    ],
)  # fmt: skip
def test_outputs_and_state_are_those_of_the_reference(
    key_heads: int, ratio: int, key_size: int, value_size: int, tiled: bool
) -> None:
    part = delta_net(key_heads, ratio * key_heads, key_size, value_size, tiled=tiled)
    vectors, inputs = random_vectors(part), random_inputs(part, 60)
    expected, state = reference(part, vectors, inputs)
    kernels = DeltaNetKernels(part, vectors)
    outputs = kernels.step([(0, 0, inputs)])
    assert np.abs(outputs - expected).max() <= 2e-6 * np.abs(expected).max()
    assert np.abs(kernels.whole_state(0) - state).max() <= 2e-6 * np.abs(state).max()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_chunks_and_threads_leave_the_same_bits(size: int, threads: int) -> None:
    part = delta_net(2, 6, 16, 32)
    vectors, inputs = random_vectors(part), random_inputs(part, 150)
    whole = DeltaNetKernels(part, vectors)
    expected = whole.step([(0, 0, inputs)])
    cut = DeltaNetKernels(part, vectors, threads=threads)
    np.testing.assert_array_equal(in_chunks(cut, inputs, size), expected)
    np.testing.assert_array_equal(cut.slots, whole.slots)


def test_rows_of_a_batch_have_the_bits_that_each_has_alone() -> None:
    part = delta_net(2, 4)
    vectors = random_vectors(part)
    prompts = [random_inputs(part, tokens, seed) for seed, tokens in enumerate((5, 1, 40))]
    alone = [DeltaNetKernels(part, vectors).step([(0, 0, prompt)]) for prompt in prompts]
    batch = DeltaNetKernels(part, vectors, rows=3, threads=2)
    slots = (2, 0, 1)
    first = batch.step([(slot, 0, prompt[:1]) for slot, prompt in zip(slots, prompts, strict=True)])
    rest = batch.step([(slot, 1, prompt[1:]) for slot, prompt in zip(slots, prompts, strict=True) if len(prompt) > 1])
    np.testing.assert_array_equal(first, np.concatenate([outputs[:1] for outputs in alone]))
    np.testing.assert_array_equal(rest, np.concatenate([outputs[1:] for outputs in alone]))


@pytest.mark.parametrize("seed", range(6))
def test_uncertain_tokens_leave_no_trace(seed: int) -> None:
    """Tokens that were refused, accepted and computed again, at random, change no bit of what follows."""
    rng = np.random.default_rng(seed)
    part = delta_net(2, 4, 16, 32)
    vectors, inputs = random_vectors(part), random_inputs(part, 120)
    whole = DeltaNetKernels(part, vectors)
    expected = whole.step([(0, 0, inputs)])
    kernels = DeltaNetKernels(part, vectors, threads=2)
    position = 0
    while position < len(inputs):
        right = int(rng.integers(1, 9))
        wrong = random_inputs(part, int(rng.integers(0, 4)), seed=position)
        tokens = inputs[position : position + right]
        uncertain = int(rng.integers(len(wrong), min(4, len(wrong) + len(tokens)) + 1))
        outputs = kernels.step([(0, position, np.concatenate([tokens, wrong]))], [uncertain])
        np.testing.assert_array_equal(outputs[: len(tokens)], expected[position : position + len(tokens)])
        accepted = int(rng.integers(max(len(tokens) - (uncertain - len(wrong)), 0), len(tokens) + 1))
        position += accepted
    last = [(0, position, random_inputs(part, 1, seed=77))]
    np.testing.assert_array_equal(kernels.step(last), whole.step(last))
    np.testing.assert_array_equal(kernels.slots, whole.slots)


def test_a_row_that_begins_again_forgets_all() -> None:
    part = delta_net(2, 2)
    vectors, inputs = random_vectors(part), random_inputs(part, 20)
    kernels = DeltaNetKernels(part, vectors)
    first = kernels.step([(0, 0, inputs)])
    kernels.step([(0, 20, random_inputs(part, 3, seed=9))], [3])
    np.testing.assert_array_equal(kernels.step([(0, 0, inputs[:2])], [2]), first[:2])
    np.testing.assert_array_equal(kernels.step([(0, 2, inputs[2:])]), first[2:])


def test_ten_thousand_tokens_stay_near_float64() -> None:
    part = delta_net(1, 2, 16, 16)
    vectors, inputs = random_vectors(part), random_inputs(part, 10_000)
    vectors["rate"][:] = -1e-4, -0.01  # one head that forgets next to nothing
    expected, state = reference(part, vectors, inputs)
    kernels = DeltaNetKernels(part, vectors)
    outputs = in_chunks(kernels, inputs, 2048)
    assert np.abs(outputs - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(kernels.whole_state(0) - state).max() <= 1e-5 * np.abs(state).max()


def test_large_inputs_give_finite_gates() -> None:
    """exp of what beta and decay are made of would not fit a float32."""
    part = delta_net(1, 1)
    vectors, inputs = random_vectors(part), random_inputs(part, 8)
    inputs[:, -2:] = np.float32([[-500, 500], [500, -500], [-100, 100], [100, -100]] * 2)
    expected, _ = reference(part, vectors, inputs)
    outputs = DeltaNetKernels(part, vectors).step([(0, 0, inputs)])
    assert np.abs(outputs - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("lanes", wider([4, 8], 4))
def test_narrower_vectors_give_the_same_numbers(lanes: int) -> None:
    part = delta_net(2, 4, 16, 24)
    vectors, inputs = random_vectors(part), random_inputs(part, 30)
    expected, state = reference(part, vectors, inputs)
    kernels = DeltaNetKernels(part, vectors, lanes=lanes)
    assert np.abs(kernels.step([(0, 0, inputs)]) - expected).max() <= 2e-6 * np.abs(expected).max()
    assert np.abs(kernels.whole_state(0) - state).max() <= 2e-6 * np.abs(state).max()


def test_runs_are_whole_vectors() -> None:
    assert [run_columns(size, 16) for size in (128, 64, 96, 32, 48, 16, 24)] == [64, 64, 32, 32, 16, 16, 0]
    assert [run_columns(size, 8) for size in (128, 24, 12)] == [32, 8, 0]
    assert [head_lanes(sizes, 16) for sizes in ((128, 128), (8, 24), (16, 12), (16, 6))] == [16, 8, 4, 0]
    assert head_lanes((128, 128), 8) == 8

"""Kernels of the GPU backend, interpreted, each beside its twin in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
triton = pytest.importorskip("triton", reason="the GPU backend needs triton")

import triton.language as tl  # noqa: E402

from backends.cuda.layouts.activation_values import half_activations, half_positions, int8_activations  # noqa: E402
from realizar.backends.cuda.kernels.activate import activate, convert  # noqa: E402
from realizar.backends.cuda.kernels.attend import attend_chunk  # noqa: E402
from realizar.backends.cuda.kernels.attend_parts import attend_parts  # noqa: E402
from realizar.backends.cuda.kernels.choose import choose, finish_logits  # noqa: E402
from realizar.backends.cuda.kernels.embed import embed_quantized  # noqa: E402
from realizar.backends.cuda.kernels.fetch import fetch  # noqa: E402
from realizar.backends.cuda.kernels.heads import store_heads  # noqa: E402
from realizar.backends.cuda.kernels.normalize import normalize  # noqa: E402
from realizar.backends.cuda.kernels.normalize_parallel import normalize_parallel, normalize_twice  # noqa: E402
from realizar.backends.cuda.matmul.inputs import ActivationBuffers, InputFormat  # noqa: E402
from realizar.backends.cuda.weights.plain import pack_plain  # noqa: E402
from realizar.quantization.block_source import block_source  # noqa: E402
from realizar.quantization.convert import QUANTIZED_TYPES, dequantize  # noqa: E402
from realizar.quantization.microscaling import e4m3  # noqa: E402
from realizar.quantization.random_blocks import random_blocks  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU"),
    # exp of large numbers is meant to be infinite; rows are written before their power of two is known
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
CPU = torch.device("cpu")


@triton.jit
def keep_rows(x: Any, keys: Any, values: Any, scales: Any, out: Any, INT8: tl.constexpr) -> None:
    """A key and a value of 64 dimensions into the first slot of a cache, and what that holds."""
    part, dims = tl.arange(0, 2)[:, None], tl.arange(0, 64)[None, :]
    rows = tl.load(x + part * 64 + dims)
    held = store_heads(
        rows, keys, values, scales, scales + 2, part * 0, part * 0, part == 0, part == 1, dims, 1, 64, 64, 16, INT8, 2
    )  # fmt: skip
    tl.store(out + part * 64 + dims, held)


ROWS, COLS = 5, 130  # neither whole chunks of 64 nor whole groups of 32


def poisoned(form: InputFormat) -> object:
    """A buffer full of NaN and -1: what a kernel leaves unwritten is seen."""
    buffer = ActivationBuffers(ROWS, CPU).get(form, COLS)
    for tensor in (buffer.values, buffer.scales, buffer.codes, buffer.terms):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return buffer


def rows_of(seed: int) -> np.ndarray:
    """Rows whose largest values are usual, beyond a float16, and far below its range."""
    x = np.random.default_rng(seed).standard_normal((ROWS, COLS)).astype(np.float32)
    x[1] *= 1e6
    x[2] *= 1e-6
    x[3] = 0.0
    return x


def start_convert(x: np.ndarray, form: InputFormat, block: int) -> object:
    buffer = poisoned(form)
    state = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    padded = -(-COLS // 64) * 64
    convert[(ROWS, -(-padded // block))](
        torch.from_numpy(x), COLS, COLS, *buffer.pointers(), *state, **buffer.constants(), DEPENDENT=False, BLOCK=block
    )  # fmt: skip
    assert not any(tensor.any() for tensor in state)
    return buffer


@pytest.mark.parametrize("block", [64, 256])
def test_int8_rows(block: int) -> None:
    x = rows_of(1)
    found = start_convert(x, InputFormat("int8"), block)
    codes, terms = int8_activations(x)
    assert np.abs(found.codes.numpy().astype(int) - codes).max() <= 1  # where x / scale is half-way
    assert (found.codes.numpy() == codes).mean() > 0.99
    scales = terms[..., 0]
    np.testing.assert_allclose(found.terms.numpy()[..., 0], scales, rtol=1e-6)
    sums = scales * found.codes.numpy().reshape(ROWS, -1, 16).sum(axis=2)
    np.testing.assert_allclose(found.terms.numpy()[..., 1], sums, rtol=1e-5, atol=1e-6 * scales.max())


@pytest.mark.parametrize("block_tokens", [1, 8, 16])
@pytest.mark.parametrize("block", [64, 256])
def test_half_rows(block: int, block_tokens: int) -> None:
    x = rows_of(2)
    found = start_convert(x, InputFormat("half", block_tokens), block)
    values, scales = half_activations(x, block_tokens)
    assert np.array_equal(found.scales.numpy()[:ROWS], scales[:ROWS])
    written = np.arange(len(scales)) < ROWS
    mask = np.broadcast_to(written.reshape(len(values), 1, 1, *values.shape[3:5], 1), values.shape)
    assert np.array_equal(found.values.numpy()[mask].view(np.uint16), values[mask].view(np.uint16))


def test_scaled_rows() -> None:
    x = rows_of(3)
    found = start_convert(x, InputFormat("f16"), 64)
    _, scales = half_activations(x, 8)
    assert np.array_equal(found.scales.numpy(), scales[:ROWS])
    assert np.array_equal(found.values.numpy(), (x / scales[:ROWS, None]).astype(np.float16))


def as_activated(gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
    gelu = torch.nn.functional.gelu
    if kind == 4:
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if kind == 5:
        return torch.relu(gate) ** 2 * up
    return (torch.nn.functional.silu(gate), gelu(gate, approximate="tanh"), gelu(gate))[kind] * up


@pytest.mark.parametrize("kind", [0, 1, 2, 4, 5])
def test_activation(kind: int) -> None:
    """The input has two splits and a bias; gate and up are 1,000 times as large in one row."""
    rng = np.random.default_rng(4)
    parts = rng.standard_normal((2, ROWS, 2 * COLS)).astype(np.float32)
    parts[:, 2] *= 1e3
    bias = rng.standard_normal(2 * COLS).astype(np.float32)
    buffer, partials = poisoned(InputFormat("f16")), torch.from_numpy(parts)
    state = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    activate[(ROWS, 3)](
        partials, partials.stride(0), partials.stride(1), torch.from_numpy(bias), COLS, COLS, *buffer.pointers(),
        *state, SPLITS=2, BIAS=True, KIND=kind, GATED=True, INTERLEAVED=False, DEPENDENT=False, BLOCK=64,
        **buffer.constants(),
    )  # fmt: skip
    both = torch.from_numpy(parts.astype(np.float64).sum(axis=0) + bias)
    expected = as_activated(both[:, :COLS], both[:, COLS:], kind)
    found = buffer.values.double() * buffer.scales[:, None].double()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-3


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_activation_of_gate_and_up_by_turns(factor: float) -> None:
    """64 columns of each; with large values the rows are divided once all of their blocks are done."""
    cols, kind = 192, 0
    parts = torch.from_numpy(np.random.default_rng(8).standard_normal((2, ROWS, 3, 2, 64)).astype(np.float32) * factor)
    partials = parts.reshape(2, ROWS, 2 * cols)
    buffer = ActivationBuffers(ROWS, CPU).get(InputFormat("f16"), cols)
    state = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    activate[(ROWS, 3)](
        partials, partials.stride(0), partials.stride(1), torch.zeros(1), 64, cols, *buffer.pointers(), *state,
        SPLITS=2, BIAS=False, KIND=kind, GATED=True, INTERLEAVED=True, DEPENDENT=False, BLOCK=64, **buffer.constants(),
    )  # fmt: skip
    both = parts.double().sum(0)
    expected = as_activated(both[:, :, 0], both[:, :, 1], kind).reshape(ROWS, cols)
    found = buffer.values.double() * buffer.scales[:, None].double()
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).max() < 1e-3


def test_normalize_adds_a_branch() -> None:
    """hidden += 0.5 * norm(matmul), then a LayerNorm of it, into float32."""
    rng = np.random.default_rng(5)
    parts, hidden = (rng.standard_normal(shape) for shape in ((3, ROWS, COLS), (ROWS, COLS)))
    vectors = [torch.from_numpy(rng.standard_normal(COLS).astype(np.float32)) for _ in range(4)]
    bias, branch_weight, weight, norm_bias = vectors
    partials, stream = (torch.from_numpy(values.astype(np.float32)) for values in (parts, hidden))
    out, square_sums, none = torch.full((ROWS, COLS), float("nan")), torch.full((ROWS, 8), float("nan")), torch.zeros(1)
    normalize[(ROWS,)](
        partials, partials.stride(0), partials.stride(1), bias, none, branch_weight, none, 1e-5, 0.5, 1.0, stream,
        weight, norm_bias, 1e-5, out, COLS, none, none, none, COLS, square_sums, SPLITS=3, MATMUL_BIAS=True,
        BRANCH_NORM=1, BRANCH_BIAS=False, NORM=2, NORM_BIAS=True, GATHER=False, FORMAT=0, BLOCK_TOKENS=1, CHUNKS=1,
        DEPENDENT=False, PARTS=8, BLOCK=256,
    )  # fmt: skip
    branch = parts.sum(axis=0) + bias.numpy()
    branch *= branch_weight.numpy() / np.sqrt((branch**2).mean(axis=1, keepdims=True) + 1e-5)
    expected = hidden + 0.5 * branch
    np.testing.assert_allclose(stream.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(square_sums[:, 0].numpy(), (expected**2).sum(axis=1), rtol=1e-5)
    assert (square_sums[:, 1:] == 0).all()
    centred = expected - expected.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out.numpy(), normed * weight.numpy() + norm_bias.numpy(), rtol=1e-4, atol=1e-4)


def rms(x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
    """An RMSNorm in float64."""
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight.numpy()


def floats(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("second", [0, 4], ids=["two", "one"])
def test_two_norms_of_a_stream(second: int) -> None:
    """hidden = (hidden + 0.5 * norm(matmul)) * 2, then two norms of it; the format of NOTHING leaves the second out."""
    rng = np.random.default_rng(8)
    partials, stream, matmul_bias = floats(rng, 2, ROWS, COLS), floats(rng, ROWS, COLS), floats(rng, COLS)
    none = torch.zeros(1)
    branch_weight, first_weight, second_weight = (floats(rng, COLS) for _ in range(3))
    before, outs = stream.double().numpy(), torch.full((2, ROWS, COLS), float("nan"))
    normalize_twice[(ROWS,)](
        partials, partials.stride(0), partials.stride(1), matmul_bias, branch_weight, none, 1e-5, 0.5, 2.0, stream,
        first_weight, none, 1e-5, outs[0], COLS, none, none, none, second_weight, none, 1e-5, outs[1], COLS, none,
        none, none, COLS, SPLITS=2, MATMUL_BIAS=True, BRANCH_NORM=1, BRANCH_BIAS=False, NORM=1, NORM_BIAS=False,
        FORMAT=0, BLOCK_TOKENS=1, SECOND_NORM=1, SECOND_BIAS=False, SECOND_FORMAT=second, SECOND_BLOCK_TOKENS=1,
        CHUNKS=1, DEPENDENT=False, BLOCK=256,
    )  # fmt: skip
    branch = partials.double().sum(0).numpy() + matmul_bias.numpy()
    expected = (before + 0.5 * rms(branch, branch_weight)) * 2
    np.testing.assert_allclose(stream.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outs[0].numpy(), rms(expected, first_weight), rtol=1e-4, atol=1e-4)
    if second == 0:
        np.testing.assert_allclose(outs[1].numpy(), rms(expected, second_weight), rtol=1e-4, atol=1e-4)
    else:
        assert bool(outs[1].isnan().all())


def test_norms_of_parallel_sums() -> None:
    """hidden = (hidden + norm(norm(experts) + norm(matmul))) * 0.5, then a norm of it."""
    rng = np.random.default_rng(9)
    experts, dense, stream = floats(rng, ROWS, 3, COLS), floats(rng, 2, ROWS, COLS), floats(rng, ROWS, COLS)
    own_weight, dense_weight, branch_weight, weight, bias = (floats(rng, COLS) for _ in range(5))
    before, own, none = stream.double().numpy(), experts.transpose(0, 1), torch.zeros(1)
    out, square_sums = torch.full((ROWS, COLS), float("nan")), torch.full((ROWS, 8), float("nan"))
    normalize_parallel[(ROWS,)](
        own, own.stride(0), own.stride(1), none, own_weight, none, 1e-5, dense, dense.stride(0), dense.stride(1),
        bias, dense_weight, none, 1e-5, branch_weight, none, 1e-5, 1.0, 0.5, stream, weight, none, 1e-5, out, COLS,
        none, none, none, COLS, square_sums, SPLITS=3, MATMUL_BIAS=False, OWN_NORM=1, OWN_BIAS=False, DENSE_SPLITS=2,
        DENSE_MATMUL_BIAS=True, DENSE_NORM=1, DENSE_BIAS=False, BRANCH_NORM=1, BRANCH_BIAS=False, NORM=1,
        NORM_BIAS=False, FORMAT=0, BLOCK_TOKENS=1, CHUNKS=1, DEPENDENT=False, PARTS=8, BLOCK=256,
    )  # fmt: skip
    first = rms(experts.double().sum(1).numpy(), own_weight)
    second = rms(dense.double().sum(0).numpy() + bias.numpy(), dense_weight)
    expected = (before + rms(first + second, branch_weight)) * 0.5
    np.testing.assert_allclose(stream.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(square_sums.sum(dim=1).numpy(), (expected**2).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(out.numpy(), rms(expected, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_embedding_of_every_type(ggml_type: object) -> None:
    """Bit for bit the reference's weights; id -1 is the row's last token, -2 - id has an embedding, which stays."""
    cols = max(64, ggml_type.block_size)
    data = random_blocks(ggml_type, 9, cols, np.random.default_rng(6), 0.1)
    matrix = pack_plain(block_source(ggml_type, data, 9, cols), CPU)
    ids, rows, last = (torch.tensor(v, dtype=torch.int32) for v in ([8, -1, 0, -5], [0, 1, 0, 1], [2, 5]))
    expected = dequantize(ggml_type, data.view(np.uint8).reshape(-1), 9, cols)[[8, 5, 0, 3]] * np.float32(2)
    for given in (False, True):
        out = torch.full((4, cols), 7.0)
        embed_quantized[(4, -(-cols // 256))](
            ids, rows, last, out, cols, 2.0, cols=cols, **matrix.arrays, **matrix.constants, GIVEN=given,
            DEPENDENT=False, BLOCK=256, first=0, count=9, PART=0,
        )  # fmt: skip
        assert np.array_equal(out[:3].numpy(), expected[:3])
        assert np.array_equal(out[3].numpy(), np.full(cols, 7.0) if given else expected[3])


@pytest.mark.parametrize(("count", "copied"), [(7, 64), (64, 64), (70, 70), (200, 200)])
@pytest.mark.parametrize("programs", [1, 2, 9])
def test_fetch_copies_what_is_asked_for(count: int, copied: int, programs: int) -> None:
    """Two blocks in any case; programs share the others."""
    host, device = torch.arange(200, dtype=torch.int32), torch.full((200,), -1, dtype=torch.int32)
    host[5] = count
    fetch[(2 + programs,)](host, device, COUNT=5, WHOLE=2, BLOCK=32)
    assert torch.equal(device[:copied], host[:copied])
    assert (device[copied:] == -1).all()


def test_largest_logits() -> None:
    """The lowest id among equals, across blocks; a NaN or an infinity gives -1."""
    values = np.random.default_rng(7).standard_normal((5, 300)).astype(np.float32)
    values[0, [70, 200]] = 9.0
    values[1, 299] = 9.0
    values[2, 100] = np.nan
    values[3, 5] = np.inf
    values[4, 60:] = -np.inf
    partials = torch.from_numpy(values[None] / 2)
    logits = torch.full((5, 300), float("nan"))
    tops, ids = torch.zeros(5, 5), torch.zeros(5, 5, dtype=torch.int32)
    finish_logits[(5, 5)](
        partials, 0, 300, partials, logits, 300, 2.0, 1.0, tops, ids, 5, 300, SPLITS=1, BIAS=False, SOFT_CAP=False,
        DEPENDENT=False, BLOCK=64,
    )  # fmt: skip
    sampled, last = torch.zeros(5, dtype=torch.int32), torch.full((6,), 7, dtype=torch.int32)
    rows = torch.tensor([3, 1, 2, -1, 5], dtype=torch.int32)
    choose[(5,)](tops, ids, 5, sampled, rows, last, ids, DEPENDENT=False, BLOCKS=8, NAMED=False)
    assert np.array_equal(logits.numpy(), values, equal_nan=True)
    assert sampled.tolist() == [70, 299, -1, -1, int(values[4].argmax())]
    assert last.tolist() == [7, 299, 0, 70, 7, int(values[4].argmax())]
    named = torch.arange(1000, 1300, dtype=torch.int32)
    choose[(5,)](tops, ids, 5, sampled, rows, last, named, DEPENDENT=False, BLOCKS=8, NAMED=True)
    assert sampled.tolist() == [1070, 1299, -1, -1, 1000 + int(values[4].argmax())]
    assert last.tolist() == [7, 1299, 0, 1070, 7, 1000 + int(values[4].argmax())]


def of_halves(values: torch.Tensor, tokens: int, cols: int) -> np.ndarray:
    """float32 [tokens, cols] of what `write_result` wrote for matmuls: blocks of eight tokens."""
    core, place = half_positions(cols).T
    token = np.arange(tokens)[:, None]
    at = ((token // 8 * (cols // 64) + np.arange(cols) // 64) * 8 + core) * 64 + token % 8 * 8 + place
    return values.view(-1).numpy()[at].astype(np.float32)


@pytest.mark.parametrize(
    ("part", "halves", "image"),
    [(0, False, 0), (32, False, 0), (64, False, 0), (32, True, 0), (0, False, 7), (32, True, 7)],
)
def test_a_chunk_sees_its_window(part: int, halves: bool, image: int) -> None:
    """Attention of a chunk after a prefix over shuffled blocks, with a window, a cap and sinks; also by parts.

    An image of so many tokens from the third on is seen whole, by tiles in two shares.
    """
    rng = np.random.default_rng(8)
    heads, size, length, chunk, window, cap = 2, 32, 75, 11, 9, 4.0
    keys, values = (rng.standard_normal((6, 1, 16, size)).astype(np.float32) for _ in range(2))
    table = np.array([4, 0, 5, 2, 1], np.int32)
    query = rng.standard_normal((chunk, heads * size)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    out, none = torch.full((chunk, heads * size), float("nan")), torch.zeros(1)
    values_out, value_scale = torch.full((2 * 8 * 64,), float("nan"), dtype=torch.float16), torch.zeros(chunk)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    sees = np.arange(length - chunk, length, dtype=np.int32)
    sees[2 : 2 + image] = sees[2 + image - 1] if image else sees[2:2]
    attend_chunk[(3, 1, 2 if image else 1)](
        torch.from_numpy(query), torch.from_numpy(keys), torch.from_numpy(values), none, none, torch.from_numpy(sinks),
        out, ints(0, 0, -1), ints(8, 0, 0), ints(0), ints(chunk), ints(length), torch.from_numpy(table), ints(5),
        torch.from_numpy(sees), 0.3, cap, heads * size, heads * size, values_out, value_scale, 8, 1, TABLE_ROWS=1,
        CACHE_GROUP=0, HEADS=heads, KV_HEADS=1, HEAD=size, PADDED_HEAD=size, BLOCK_SIZE=16, WINDOW=window,
        SOFT_CAP=True, SINKS=True, INT8=False, COMPUTE=__import__("triton").language.float32, KEYS=16, QUERIES=16,
        TOKENS=4 if image else 8, PART=part, HALVES=halves, WHOLE=image > 0, DEPENDENT=False,
    )  # fmt: skip
    found = out.numpy()
    if halves:
        assert torch.isnan(out).all()
        assert (value_scale == 1.0).all()
        found = of_halves(values_out, chunk, heads * size)
    flat = [part[table, 0].reshape(-1, size)[:length].astype(np.float64) for part in (keys, values)]
    for token in range(chunk):
        position = length - chunk + token
        seen = slice(max(0, position - window + 1), int(sees[token]) + 1)
        for head in range(heads):
            q = query[token, head * size : (head + 1) * size].astype(np.float64)
            scores = cap * np.tanh(flat[0][seen] @ q * 0.3 / cap)
            weights = np.exp(np.append(scores, sinks[head]))
            expected = weights[:-1] @ flat[1][seen] / weights.sum()
            mine = found[token, head * size : (head + 1) * size]
            np.testing.assert_allclose(mine, expected, atol=2e-3 if halves else 1e-5)


@pytest.mark.parametrize("programs", [1, 2, 3, 8])
@pytest.mark.parametrize(("window", "halves"), [(0, False), (70, False), (70, True)])
def test_a_token_sees_all_parts_of_its_context(window: int, halves: bool, programs: int) -> None:
    """A decode, one without a row, and one of a short context, by programs fewer and more than parts; with sinks."""
    rng = np.random.default_rng(9)
    heads, kv_heads, size, lengths, part = 6, 2, 32, {0: 139, 2: 11}, 32
    keys, values = (rng.standard_normal((20, kv_heads, 16, size)).astype(np.float32) for _ in range(2))
    tables = rng.permutation(20)[:18].astype(np.int32).reshape(2, 9)
    query = rng.standard_normal((3, heads * size)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    out, none = torch.full((3, heads * size), float("nan")), torch.zeros(1)
    partial, state = torch.full((3 * 5 * heads * size,), float("nan")), torch.full((3 * 5 * heads * 2,), float("nan"))
    values_out, value_scale = torch.full((8 * heads * size,), float("nan"), dtype=torch.float16), torch.zeros(3)
    arrivals = torch.zeros(3 * kv_heads, dtype=torch.int32)
    decodes = [[0, 2, 139, 138], [-1, -1, -1, -1], [1, 0, 11, 10]]
    attend_parts[(3, kv_heads, programs)](
        torch.from_numpy(query), torch.from_numpy(keys), torch.from_numpy(values), none, none, torch.from_numpy(sinks),
        out, partial, state, arrivals, torch.tensor(decodes, dtype=torch.int32), torch.from_numpy(tables),
        torch.tensor([9], dtype=torch.int32), 0.3, 1.0, heads * size, heads * size, values_out, value_scale, 8, 3,
        TABLE_ROWS=2, CACHE_GROUP=0, HEADS=heads, KV_HEADS=kv_heads, HEAD=size, PADDED_HEAD=size, BLOCK_SIZE=16,
        WINDOW=window, SOFT_CAP=False, SINKS=True, INT8=False, COMPUTE=__import__("triton").language.float32, KEYS=16,
        QUERIES=16, SHARED=4, PART=part, PARTS=5, HALVES=halves, DEPENDENT=False,
    )  # fmt: skip
    assert not arrivals.any()
    assert torch.isnan(out[1]).all()
    found = out.numpy()
    if halves:
        assert torch.isnan(out).all()
        assert value_scale.tolist() == [1.0, 0.0, 1.0]
        found = of_halves(values_out, 3, heads * size)
        assert np.isnan(found[1]).all()
    for row, (token, length) in enumerate({2: lengths[0], 0: lengths[2]}.items()):
        seen = slice(max(0, length - window) if window else 0, length)
        for head in range(heads):
            k, v = (part[tables[row], head // 3].reshape(-1, size)[seen].astype(np.float64) for part in (keys, values))
            own = slice(head * size, (head + 1) * size)
            weights = np.exp(np.append(k @ query[token, own].astype(np.float64) * 0.3, sinks[head]))
            expected = weights[:-1] @ v / weights.sum()
            np.testing.assert_allclose(found[token, own], expected, atol=2e-3 if halves else 1e-5)


@pytest.mark.parametrize("kv", ["f16", "int8", "fp8"])
def test_what_is_no_number_stays_so_in_the_cache(kv: str) -> None:
    """Of int8 with all that share its scale; and so it is read."""
    x = torch.ones(2, 64)
    x[0, 40] = x[1, 3] = torch.nan
    dtype = {"f16": torch.float16, "int8": torch.int8, "fp8": torch.uint8}[kv]
    keys, values = (torch.zeros(16, 64, dtype=dtype) for _ in range(2))
    scales, out = torch.ones(4, dtype=torch.float32 if kv == "fp8" else torch.float16), torch.zeros(2, 64)
    keep_rows[(1,)](x, keys, values, scales, out, INT8=kv == "int8")
    lost = torch.isnan(out)
    assert lost[0, 40]
    assert lost[1, 3]
    assert lost.sum() == (64 if kv == "int8" else 2)
    if kv == "int8":
        assert torch.isnan(scales).tolist() == [False, True, True, False]
    elif kv == "fp8":
        np.testing.assert_array_equal(e4m3()[torch.stack([keys[0], values[0]]).numpy()], out.numpy())

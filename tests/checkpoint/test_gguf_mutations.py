"""Damaged copies of a valid GGUF file: a checkpoint or `CheckpointError`, soon, and nothing else."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.refusals import MAX_RSS, MAX_SECONDS
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CheckpointError

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["<s>", "▁a", "", "b" * 20],
    "tokenizer.ggml.scores": np.arange(4, dtype=np.float32),
    "tokenizer.ggml.add_bos_token": True,
    "flags": np.array([True, False, True]),
    "nested": [[1, 2], ["x", "y"]],
    "split.count": np.uint16(1),
    "split.no": np.uint16(0),
}
TENSORS = [
    NewTensor("token_embd.weight", GGMLType.Q4_0, (4, 64), np.arange(144, dtype=np.uint8)),
    NewTensor("output_norm.weight", GGMLType.F32, (64,), np.ones(64, np.float32)),
    NewTensor("cube", GGMLType.F16, (2, 3, 4, 5), np.ones(120, np.float16)),
]
SPECIAL = (b"\x00" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00", b"\t\x00\x00\x00")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.fixture(scope="module")
def valid(folder: Path) -> bytes:
    path = folder / "valid.gguf"
    write_gguf(path, METADATA, TENSORS)
    return path.read_bytes()


def open_and_touch(folder: Path, data: bytes) -> None:
    path = folder / "mutant"
    path.write_bytes(data)
    peak_before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - both outcomes are allowed
    else:
        for tensor in checkpoint.tensors.values():
            assert tensor.data.size == tensor.size_bytes
            assert tensor.offset + tensor.size_bytes <= len(data)
            assert data[tensor.offset : tensor.offset + tensor.size_bytes] == tensor.data.tobytes()
    assert time.process_time() - started < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < MAX_RSS


def test_the_original_opens(folder: Path, valid: bytes) -> None:
    path = folder / "original"
    path.write_bytes(valid)
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.metadata) == len(METADATA)
    assert list(checkpoint.tensors) == [tensor.name for tensor in TENSORS]


def test_every_truncation(folder: Path, valid: bytes) -> None:
    """The last tensor is padded, so only cuts within that padding leave a whole file."""
    padding = -TENSORS[-1].size_bytes % 64
    for size in range(0, len(valid) - padding, 3):
        path = folder / "cut"
        path.write_bytes(valid[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@given(data=st.data())
def test_changed_bytes(folder: Path, valid: bytes, data: st.DataObject) -> None:
    mutant = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        mutant[data.draw(st.integers(0, len(valid) - 1))] = data.draw(st.integers(0, 255))
    open_and_touch(folder, bytes(mutant))


@given(data=st.data())
def test_special_numbers(folder: Path, valid: bytes, data: st.DataObject) -> None:
    """Extreme lengths, counts and types over any place of the header."""
    number = data.draw(st.sampled_from(SPECIAL))
    place = data.draw(st.integers(0, len(valid) - 1))
    open_and_touch(folder, valid[:place] + number + valid[place + len(number) :])


@given(data=st.data())
def test_spliced_chunks(folder: Path, valid: bytes, data: st.DataObject) -> None:
    """A piece of the file, or a few bytes of noise, inserted or in place of another piece."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(valid)), min_size=2, max_size=2)))
    noise = st.binary(max_size=40)
    place = data.draw(st.tuples(st.integers(0, len(valid)), st.integers(0, 64)))
    piece = data.draw(st.one_of(noise, st.just(valid[place[0] : place[0] + place[1]])))
    open_and_touch(folder, valid[: cuts[0]] + piece + valid[cuts[1] :])
    open_and_touch(folder, valid[: cuts[0]] + piece + valid[cuts[0] :])


@given(
    body=st.binary(max_size=400), version=st.sampled_from([2, 3]), tensors=st.integers(0, 3), pairs=st.integers(0, 4)
)
def test_noise_behind_a_good_start(folder: Path, body: bytes, version: int, tensors: int, pairs: int) -> None:
    start = b"GGUF" + version.to_bytes(4, "little") + tensors.to_bytes(8, "little") + pairs.to_bytes(8, "little")
    open_and_touch(folder, start + body)

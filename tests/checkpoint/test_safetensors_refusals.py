"""Malformed safetensors files, each refused at once by name, place and reason; and damaged copies of a valid one."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from checkpoint.refusals import MAX_SECONDS, refused
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CheckpointError


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def build(header: object, data: int = 8, *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + bytes(data)


W = "tensor 'w'"
HUGE = (1 << 64) - 1

CASES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "offset 0", "empty"),
    "short": (b"\x08\0\0\0\0\0\0", "offset 0", "too short for a header: 7 bytes"),
    "no header": (build(b"", 0), "offset 8", "not a JSON object"),
    "header over 100 MB": (build(b"{", size=100_000_001), "offset 0", "header of 100000001 bytes exceeds the limit"),
    "header of 2^64": (build(b"{", size=HUGE), "offset 0", "exceeds the limit"),
    "header past the end": (build({"w": entry()}, 0, size=5000), "offset 0", "past the end of the file"),
    "header not an object": (build(b"[1, 2]"), "offset 8", "not a JSON object"),
    "bad JSON": (build(b'{"w": }'), "offset 14", "bad JSON: Expecting value"),
    "JSON cut": (build(b'{"w": {"dtype": "F32"'), "offset 29", "bad JSON"),
    "text after JSON": (build(b"{} {}"), "offset 11", "bad JSON: Extra data"),
    "bad UTF-8": (build(b'{"\xff": 1}'), "offset 10", "not valid UTF-8"),
    "NaN": (build(b'{"w": NaN}'), "offset 8", "NaN is not a JSON number"),
    "infinity": (build(b'{"w": -Infinity}'), "offset 8", "-Infinity is not a JSON number"),
    "number overflows": (build(b'{"w": 1e999}'), "offset 8", "the number 1e999 overflows"),
    "number of 5000 digits": (build(b'{"w": ' + b"9" * 5000 + b"}"), "offset 8", "bad JSON"),
    "100,000 deep": (build(b'{"w": ' + b"[" * 100_000), "offset 8", "nested too deep"),
    "2.6 million lists": (build(b'{"w": [' + b"[]," * 2_600_000), "offset 8", "it has too many values"),
    "lists up to the limit": (build(b'{"w": [' + b"[]," * 299_990), "offset", "bad JSON: Expecting value"),
    "duplicate tensor": (build(b'{"w": 1, "w": 2}'), "offset 8", "duplicate key 'w'"),
    "duplicate field": (build(b'{"w": {"dtype": "F32", "dtype": "F16"}}'), "offset 8", "duplicate key 'dtype'"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}, 0), "key '__metadata__'", "object of strings"),
    "metadata of a list": (build({"__metadata__": ["a"]}, 0), "key '__metadata__'", "object of strings"),
    "entry not an object": (build({"w": [1]}), W, "not an object"),
    "no dtype": (build({"w": {"shape": [2], "data_offsets": [0, 8]}}), W, "unknown dtype 'None'"),
    "unknown dtype": (build({"w": entry("F33")}), W, "unknown dtype 'F33'"),
    "dtype a list": (build({"w": entry(["F32"])}), W, "unknown dtype"),
    "no shape": (build({"w": {"dtype": "F32", "data_offsets": [0, 8]}}), W, "the shape is not a list"),
    "negative size": (build({"w": entry(shape=[-2])}), W, "the shape is not a list of whole numbers"),
    "size a bool": (build({"w": entry(shape=[True, 2])}), W, "the shape is not a list of whole numbers"),
    "size a float": (build({"w": entry(shape=[2.0])}), W, "the shape is not a list of whole numbers"),
    "product overflows": (build({"w": entry(shape=[1 << 40] * 4)}), W, "overflows"),
    "no offsets": (build({"w": {"dtype": "F32", "shape": [2]}}), W, "data offsets are not two"),
    "three offsets": (build({"w": entry(offsets=[0, 4, 8])}), W, "data offsets are not two"),
    "negative offset": (build({"w": entry(offsets=[-8, 0])}), W, "data offsets are not two whole numbers"),
    "offsets reversed": (build({"w": entry(offsets=[8, 0])}), W, "do not lie in the data section"),
    "offset past the end": (build({"w": entry(offsets=[8, 16])}), W, r"\[8, 16\] do not lie in the data section of 8"),
    "offset overflows": (build({"w": entry(offsets=[HUGE - 8, HUGE])}), W, "data offsets are not two whole numbers"),
    "data truncated": (build({"w": entry()}, 7), W, "do not lie in the data section of 7 bytes"),
    "size too small": (build({"w": entry(shape=[3])}), W, r"F32 of shape \[3\] does not take the 8 bytes"),
    "size too large": (build({"w": entry("F16")}), W, "does not take the 8 bytes"),
    "hole before": (build({"w": entry(offsets=[8, 16])}, 16), f"{W}, offset", "hole of 8 bytes.*the header"),
    "hole between": (
        build({"v": entry(), "w": entry(offsets=[12, 20])}, 20),
        f"{W}, offset",
        "hole of 4 bytes between it and tensor 'v'",
    ),
    "hole behind": (build({"w": entry()}, 24), "offset", "16 bytes after the last tensor"),
    "overlap": (
        build({"v": entry(), "w": entry(offsets=[4, 12])}, 12),
        f"{W}, offset",
        "overlaps tensor 'v'",
    ),
    "same place": (build({"v": entry(), "w": entry()}), f"{W}, offset", "overlaps tensor 'v'"),
    "empty name": (build({"": entry()}), "tensor ''", "the name is empty"),
    "surrogate name": (build({"\ud800": entry()}), "tensor '\\ud800'", "not valid text"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(tmp_path: Path, case: str) -> None:
    data, place, reason = CASES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for opened in (path, tmp_path):
        message = refused(opened)
        assert message.startswith(f"{path}: "), message
        assert place in message, message
        assert re.search(reason, message), message


def test_sparse_file_with_a_header_of_holes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(build(b"{", size=7 << 20))
    os.truncate(path, 1 << 33)
    assert "bad JSON" in refused(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutations")


@pytest.fixture(scope="module")
def valid(folder: Path) -> bytes:
    arrays = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.arange(6, dtype=np.float16),
        "mask": np.ones(4, np.bool_),
    }
    save_file(arrays, folder / "valid.safetensors", metadata={"format": "pt"})
    return (folder / "valid.safetensors").read_bytes()


def open_and_compare(folder: Path, data: bytes) -> None:
    """Whatever opens must be what the `safetensors` library reads from the same bytes."""
    path = folder / "mutant.safetensors"
    path.write_bytes(data)
    started = time.process_time()
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017 - both outcomes are allowed
        assert time.process_time() - started < MAX_SECONDS
        return
    assert time.process_time() - started < MAX_SECONDS
    if data.startswith(b"GGUF"):
        return
    theirs = dict(safetensors.deserialize(data))
    assert theirs.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name]["dtype"], tuple(theirs[name]["shape"]))
        assert tensor.data.tobytes() == bytes(theirs[name]["data"])


def test_the_original_opens(folder: Path, valid: bytes) -> None:
    open_and_compare(folder, valid)
    assert set(open_checkpoint(folder / "mutant.safetensors").tensors) == {"a.weight", "b.weight", "mask"}


def test_every_truncation(folder: Path, valid: bytes) -> None:
    for size in range(len(valid)):
        path = folder / "cut.safetensors"
        path.write_bytes(valid[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@given(data=st.data())
def test_changed_bytes(folder: Path, valid: bytes, data: st.DataObject) -> None:
    mutant = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(valid) - 1))
        mutant[place] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789[]{}",:')))
    open_and_compare(folder, bytes(mutant))


@given(data=st.data())
def test_spliced_chunks(folder: Path, valid: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(valid)), min_size=2, max_size=2)))
    start, length = data.draw(st.tuples(st.integers(0, len(valid)), st.integers(0, 64)))
    piece = data.draw(st.one_of(st.binary(max_size=20), st.just(valid[start : start + length])))
    open_and_compare(folder, valid[: cuts[0]] + piece + valid[cuts[1] :])


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([1 << 31, 1 << 32, 1 << 62, 1 << 63, HUGE]))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
DTYPES = st.sampled_from(["F32", "F16", "BF16", "U8", "F4", "F6_E2M3", "C64", "f32"])
PAIRS = st.lists(NUMBERS, min_size=2, max_size=2)
ENTRIES = st.one_of(
    JSON,
    st.fixed_dictionaries({"dtype": DTYPES, "shape": st.lists(NUMBERS, max_size=4), "data_offsets": PAIRS}),
    st.fixed_dictionaries({"dtype": st.one_of(DTYPES, JSON), "shape": JSON, "data_offsets": JSON}),
)


@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES, max_size=3), size=NUMBERS)
def test_headers_of_any_json(folder: Path, header: dict[str, Any], size: int) -> None:
    open_and_compare(folder, build(header, max(0, min(size, 40))))

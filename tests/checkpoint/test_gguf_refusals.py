"""Malformed GGUF files, laid down byte by byte: each is refused at once, by name, place and reason."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from checkpoint.refusals import refused
from realizar.checkpoint.gguf import read_gguf

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
HEADER = 24  # magic, version, two counts


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))
AFTER_ARCHITECTURE = HEADER + len(ARCHITECTURE)


def tensor(name: str | bytes, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def build(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    data: int = 0,
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    pairs = [ARCHITECTURE, *(pairs or [])]
    tensors = tensors or []
    counts = (len(tensors) if num_tensors is None else num_tensors, len(pairs) if num_pairs is None else num_pairs)
    body = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % alignment) + bytes(data) if data else body


def alignment_of(value: int) -> bytes:
    return pair("general.alignment", U32, struct.pack("<I", value))


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


HUGE = (1 << 64) - 1
ROW = tensor("w", [32], offset=0)
GOOD_DATA = 4 * 32

CASES: dict[str, tuple[bytes, str, str]] = {
    "empty file": (b"", "offset 0", "empty"),
    "one byte": (b"G", "offset 0", "past the end"),
    "magic only": (b"GGUF", "offset 4", "version of 4 bytes would run past the end"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "offset 8", "number of tensors of 8 bytes"),
    "half a count": (build(num_pairs=0)[:20], "offset 16", "number of metadata pairs of 8 bytes"),
    "bad magic": (b"NOPE" + build()[4:], "offset 0", "not a GGUF file"),
    "byte-swapped magic": (b"FUGG" + build()[4:], "offset 0", "byte-swapped"),
    "byte-swapped version": (b"GGUF" + struct.pack(">I", 3) + build()[8:], "offset 4", "byte-swapped.*version 3"),
    "version 0": (build(version=0), "offset 4", "version 0 is not supported"),
    "version 1": (build(version=1), "offset 4", "version 1 is not supported"),
    "version 4": (build(version=4), "offset 4", "version 4 is not supported"),
    "more pairs than bytes": (build(num_pairs=1 << 40), "offset 16", "metadata pairs would run past the end"),
    "largest pair count": (build(num_pairs=HUGE), "offset 16", "metadata pairs would run past the end"),
    "one pair too many": (build([pair("a", U8, b"\0")], num_pairs=3), "offset", "past the end"),
    "more tensors than bytes": (build(num_tensors=1 << 33), "offset 8", "tensors would run past the end"),
    "largest tensor count": (build(num_tensors=HUGE), "offset 8", "tensors would run past the end"),
    "tensor missing": (build(num_tensors=1), f"offset {len(build())}", "past the end"),
    "too many tensors": (build([], [bytes(4 << 20)], num_tensors=1 << 16 | 1), "offset 8", "at most 65536"),
    "key longer than file": (
        build([struct.pack("<Q", 1 << 62) + b"key......................"]),
        f"offset {AFTER_ARCHITECTURE}",
        "key of 4611686018427387904 bytes would run past the end",
    ),
    "key length overflows": (
        build([struct.pack("<Q", HUGE) + b"key......................"]),
        f"offset {AFTER_ARCHITECTURE}",
        "past the end",
    ),
    "key too long": (build([pair("k" * 65536, U8, b"\0")]), f"offset {AFTER_ARCHITECTURE}", "at most 65535"),
    "string longer than file": (
        build([pair("a.b", STRING, struct.pack("<Q", 1000) + b"abc")]),
        "key 'a.b', offset",
        "string of 1000 bytes would run past the end",
    ),
    "array longer than file": (
        build([pair("a.b", ARRAY, array(F32, 1 << 60))]),
        "key 'a.b', offset",
        "float32 values of an array would run past the end",
    ),
    "array count overflows": (build([pair("a.b", ARRAY, array(U64, HUGE))]), "key 'a.b'", "past the end"),
    "string array longer than file": (
        build([pair("a.b", ARRAY, array(STRING, 1 << 40))]),
        "key 'a.b', offset",
        "strings of an array would run past the end",
    ),
    "string in array longer than file": (
        build([pair("a.b", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", HUGE)))]),
        "key 'a.b', offset",
        "string 1 of the array, of 18446744073709551615 bytes would run past the end",
    ),
    "strings end early": (
        build([pair("a.b", ARRAY, array(STRING, 3, text("x" * 30)))]),
        "key 'a.b', offset",
        "string 1 of the array would run past the end",
    ),
    "nested array longer than file": (
        build([pair("a.b", ARRAY, array(ARRAY, 1 << 50))]),
        "key 'a.b', offset",
        "inner arrays would run past the end",
    ),
    "inner array longer than file": (
        build([pair("a.b", ARRAY, array(ARRAY, 1, array(U8, 1 << 50)))]),
        "key 'a.b', offset",
        "uint8 values of an array would run past the end",
    ),
    "arrays 3 deep": (
        build([pair("a.b", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(U8, 1, b"\0"))))]),
        "key 'a.b', offset",
        "nested more than 2 deep",
    ),
    "arrays 1000 deep": (
        build([pair("a.b", ARRAY, array(ARRAY, 1) * 1000 + array(U8, 0))]),
        "key 'a.b', offset",
        "nested more than 2 deep",
    ),
    "unknown value type": (build([pair("a.b", 13, b"\0\0\0\0")]), "key 'a.b', offset", "unknown value type 13"),
    "unknown array type": (build([pair("a.b", ARRAY, array(99, 0))]), "key 'a.b', offset", "unknown value type 99"),
    "value missing": (build([pair("a.b", U64, b"\0\0")]), "key 'a.b', offset", "uint64 value of 8 bytes"),
    "bool of 2": (build([pair("a.b", BOOL, b"\2")]), "key 'a.b', offset", "a bool of 2"),
    "bool array of 2": (build([pair("a.b", ARRAY, array(BOOL, 2, b"\0\2"))]), "key 'a.b'", "neither 0 nor 1"),
    "bad UTF-8 in key": (
        build([pair(b"ab\xff", U8, b"\0")]),
        f"offset {AFTER_ARCHITECTURE + 8 + 2}",
        "key is not valid UTF-8",
    ),
    "bad UTF-8 in value": (build([pair("a.b", STRING, text(b"\xc3("))]), "key 'a.b', offset", "not valid UTF-8"),
    "surrogate in value": (build([pair("a.b", STRING, text(b"\xed\xa0\x80"))]), "key 'a.b'", "not valid UTF-8"),
    "bad UTF-8 in array": (
        build([pair("a.b", ARRAY, array(STRING, 2, text("x") + text(b"\x80")))]),
        "key 'a.b', offset",
        "string 1 of the array is not valid UTF-8",
    ),
    "bad UTF-8 in tensor name": (
        build([], [tensor(b"w\xfe", [32])], data=GOOD_DATA),
        "tensor 0, offset",
        "not valid UTF-8",
    ),
    "empty key": (build([pair("", U8, b"\0")]), f"offset {AFTER_ARCHITECTURE}", "the key is empty"),
    "duplicate key": (build([pair("a", U8, b"\0")] * 2), "offset", "duplicate key 'a'"),
    "alignment 0": (build([alignment_of(0)]), "key 'general.alignment'", "not a power of two"),
    "alignment 48": (build([alignment_of(48)]), "key 'general.alignment'", "48 is not a power of two"),
    "alignment 2 MB": (build([alignment_of(1 << 21)]), "key 'general.alignment'", "exceeds the limit of 1048576"),
    "alignment largest": (build([alignment_of(1 << 31)]), "key 'general.alignment'", "exceeds the limit"),
    "alignment of u64": (
        build([pair("general.alignment", U64, struct.pack("<Q", 32))]),
        "key 'general.alignment'",
        "uint64 and must be uint32",
    ),
    "alignment of text": (
        build([pair("general.alignment", STRING, text("32"))]),
        "general.alignment",
        "must be uint32",
    ),
    "alignment of array": (
        build([pair("general.alignment", ARRAY, array(U32, 1, struct.pack("<I", 32)))]),
        "key 'general.alignment'",
        "must be uint32",
    ),
    "no architecture": (
        build().replace(b"general.architecture", b"general.architectura"),
        "key 'general.architecture'",
        "missing",
    ),
    "architecture of u32": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("general.architecture", U32, struct.pack("<I", 1)),
        "key 'general.architecture'",
        "must be a string",
    ),
    "empty architecture": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("general.architecture", STRING, text("")),
        "key 'general.architecture'",
        "not empty",
    ),
    "5 dimensions": (build([], [tensor("w", [1] * 5)], data=64), "tensor 'w', offset", "5 dimensions; at most 4"),
    "4 billion dimensions": (
        build([], [text("w") + struct.pack("<I", 0xFFFFFFFF) + bytes(40)]),
        "tensor 'w', offset",
        "4294967295 dimensions; at most 4",
    ),
    "zero dimension": (build([], [tensor("w", [32, 0])], data=64), "tensor 'w', offset", "is zero"),
    "dimension overflows": (build([], [tensor("w", [HUGE, HUGE])], data=64), "tensor 'w', offset", "overflows"),
    "product wraps to zero": (build([], [tensor("w", [1 << 32] * 4)], data=64), "tensor 'w', offset", "overflows"),
    "product wraps to small": (
        build([], [tensor("w", [(1 << 63) + 16, 2])], data=128),
        "tensor 'w', offset",
        "overflows",
    ),
    "size in bytes overflows": (build([], [tensor("w", [1 << 62])], data=64), "tensor 'w', offset", "overflows"),
    "row not a multiple": (
        build([], [tensor("w", [40, 4], kind=2)], data=1024),
        "tensor 'w', offset",
        "rows of 40 elements are not a multiple of Q4_0's block of 32",
    ),
    "row not a super-block": (
        build([], [tensor("w", [128, 2], kind=12)], data=1024),
        "tensor 'w', offset",
        "not a multiple of Q4_K's block of 256",
    ),
    "unknown tensor type": (build([], [tensor("w", [32], kind=43)], data=64), "tensor 'w'", "unknown tensor type 43"),
    "largest tensor type": (
        build([], [tensor("w", [32], kind=0xFFFFFFFF)], data=64),
        "tensor 'w', offset",
        "unknown tensor type 4294967295",
    ),
    "offset unaligned": (
        build([], [tensor("w", [32], offset=16)], data=1024),
        "tensor 'w', offset",
        "data offset 16 is not a multiple of the alignment 32",
    ),
    "offset unaligned to 64": (
        build([alignment_of(64)], [tensor("w", [32], offset=32)], data=1024, alignment=64),
        "tensor 'w', offset",
        "32 is not a multiple of the alignment 64",
    ),
    "offset past the end": (
        build([], [tensor("w", [32], offset=1 << 40)], data=GOOD_DATA),
        "tensor 'w', offset",
        "starts past the end",
    ),
    "offset overflows": (
        build([], [tensor("w", [32], offset=HUGE - 31)], data=GOOD_DATA),
        "tensor 'w', offset",
        "starts past the end",
    ),
    "tensors overlap": (
        build([], [tensor("v", [32]), tensor("w", [32], offset=96)], data=1024),
        "tensor 'w', offset",
        "overlaps that of tensor 'v'",
    ),
    "tensors coincide": (
        build([], [tensor("v", [32]), tensor("w", [32])], data=1024),
        "tensor 'w', offset",
        "overlaps that of tensor 'v'",
    ),
    "no data": (build([], [ROW]), "tensor 'w', offset", "starts past the end"),
    "data truncated": (build([], [ROW], data=GOOD_DATA)[:-1], "tensor 'w', offset", "truncated: 128 bytes.* 127 left"),
    "duplicate tensor": (build([], [ROW, ROW], data=1024), "tensor 1, offset", "duplicate tensor 'w'"),
    "empty tensor name": (build([], [tensor("", [32])], data=1024), "tensor 0, offset", "the name is empty"),
    "tensor row cut": (build([], [ROW[:20]]), "tensor 'w', offset", "past the end"),
    **{
        f"removed type {kind}": (
            build([], [tensor("w", [256], kind=kind)], data=1024),
            "tensor 'w', offset",
            rf"tensor type {kind} \({name}\) was removed",
        )
        for kind, name in [
            (4, "Q4_2"),
            (5, "Q4_3"),
            (31, "Q4_0_4_4"),
            (33, "Q4_0_8_8"),
            (36, "IQ4_NL_4_4"),
            (38, "IQ.*"),
        ]
    },
}


def test_the_builder_makes_valid_files(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(build([pair("a", U8, b"\7"), alignment_of(64)], [ROW], data=GOOD_DATA, alignment=64))
    checkpoint = read_gguf(path)
    assert checkpoint.metadata["a"] == 7
    assert checkpoint.tensors["w"].shape == (32,)


@pytest.mark.parametrize("case", CASES)
def test_refused(tmp_path: Path, case: str) -> None:
    data, place, reason = CASES[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    message = refused(path, read_gguf)
    assert message.startswith(f"{path}: "), message
    assert place in message, message
    assert re.search(reason, message), message
    path = path.rename(tmp_path / "bad")
    assert refused(path).startswith(f"{path}: ")


SPARSE_BYTES = 8 << 30

SPARSE: dict[str, tuple[bytes, str]] = {
    "numbers": (pair("a.b", ARRAY, array(U8, SPARSE_BYTES // 2)), "over its limit of 64 MiB"),
    "string": (pair("a.b", STRING, struct.pack("<Q", SPARSE_BYTES // 2)), "over its limit of 64 MiB"),
    "empty strings": (pair("a.b", ARRAY, array(STRING, SPARSE_BYTES // 16)), "over its limit of 64 MiB"),
    "fewer empty strings": (pair("a.b", ARRAY, array(STRING, 1 << 22)), "more than 2097152 strings"),
    "empty arrays": (pair("a.b", ARRAY, array(ARRAY, 1 << 22)), "more than 2097152 strings and arrays"),
}


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_file_that_keeps_its_promises_is_refused(tmp_path: Path, case: str) -> None:
    """Counts that the file's size allows, in a file of holes: a reader that believes them never ends."""
    body, reason = SPARSE[case]
    path = tmp_path / "sparse.gguf"
    path.write_bytes(build([body]))
    os.truncate(path, SPARSE_BYTES)
    message = refused(path, read_gguf)
    assert "key 'a.b', offset" in message
    assert reason in message


def test_names_in_messages_are_short_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(build([pair("k\n\x1b[31m" + "x" * 60000, 99, b"")]))
    message = refused(path, read_gguf)
    assert message.isascii()
    assert message.isprintable()


@pytest.mark.parametrize("make", ["missing", "folder", "pipe", "device"])
def test_what_is_no_file_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "model.gguf"
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "device":
        path = Path("/dev/zero")
    message = refused(path, read_gguf)
    assert re.search("cannot be opened: No such file|not a regular file", message)

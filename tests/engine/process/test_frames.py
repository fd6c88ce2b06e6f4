"""Frames: what goes in comes out however the bytes are cut, and nothing malformed passes or takes memory."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.backends.base import Transfer
from realizar.config import EngineConfig
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Command,
    Event,
    Failed,
    Load,
    Loading,
    Outputs,
    Ping,
    Pong,
    Refused,
    Reply,
    Shutdown,
)
from realizar.engine.stats import EngineStats
from realizar.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RealizarError,
)
from realizar.ipc.error_records import ErrorRecord, record_error, restore_error
from realizar.ipc.frames import (
    MAX_FRAME_BYTES,
    Channel,
    ChannelError,
    ChannelTimeoutError,
    FrameError,
    FrameReader,
    encode_frame,
)
from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Client, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from step_inputs import DeltaWriter, TokenOutput

_TEXT = st.text(max_size=20)
_COUNT = st.integers(0, 2**40)
_FLOAT = st.floats(allow_nan=False)
_SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=5),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    structured=st.none() | st.builds(StructuredOutput, st.just("regex"), st.text(min_size=1, max_size=9)),
)
_REQUEST = st.builds(
    Request,
    request_id=_TEXT,
    prompt_token_ids=st.lists(st.integers(0, 2**31), max_size=50).map(tuple),
    sampling=_SAMPLING,
    max_tokens=_COUNT,
    arrival_s=_FLOAT,
    priority=st.integers(-5, 5),
    cache_salt=st.none() | _TEXT,
    pooling=st.none() | st.sampled_from(["last", "mean"]),
    client=st.builds(Client, name=_TEXT, weight=st.integers(1, 9)),
    prompt_marks=st.lists(st.integers(1, 2**31), max_size=5).map(tuple),
    embeddings=st.lists(
        st.builds(PromptEmbeddings, st.integers(0, 2**31), st.binary(max_size=64), st.binary(max_size=64)), max_size=3
    ).map(tuple),
)
_COMMANDS = st.one_of(
    st.builds(Load, _TEXT, st.just(EngineConfig(threads=2, kv_cache_bytes=1 << 40))),
    st.builds(Add, _REQUEST),
    st.builds(Abort, _TEXT, st.none() | _COUNT),
    st.builds(Ask, _COUNT, st.sampled_from(["stats", "wake"])),
    st.just(Ping()),
    st.just(Shutdown()),
)
_ID = st.integers(0, 2**31 - 1)
_LOGPROBS = st.builds(TokenLogprobs, _ID, _FLOAT, _ID, st.lists(st.tuples(_ID, _FLOAT), max_size=4).map(tuple))
_OUTPUT = st.builds(
    TokenOutput,
    request_id=_TEXT,
    choice=_COUNT,
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    scheduled_s=_FLOAT,
    produced_s=_FLOAT,
    logprobs=st.lists(_LOGPROBS, max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_token_id=st.none() | _COUNT,
    pooled=st.none() | st.lists(_FLOAT, max_size=4).map(tuple),
    error=st.none() | st.builds(RowError, _TEXT),
)
_DELTAS = st.lists(_OUTPUT, max_size=4).map(lambda outputs: DeltaWriter().deltas(outputs))
_ERROR = st.builds(ErrorRecord, _TEXT, _TEXT, st.none() | _TEXT)
_EVENTS = st.one_of(
    st.builds(Loading, _TEXT, _FLOAT),
    st.builds(Accepted, _TEXT),
    st.builds(Refused, _TEXT, _ERROR),
    st.builds(Outputs, _DELTAS),
    st.builds(Reply, _COUNT, st.builds(EngineStats, _COUNT, _COUNT, step_s=_FLOAT)),
    st.builds(Reply, _COUNT, st.none() | _TEXT | st.builds(Transfer, _COUNT, _FLOAT)),
    st.builds(Reply, _COUNT, st.none(), _ERROR),
    st.builds(Pong, _FLOAT),
    st.builds(Failed, _ERROR),
)


@pytest.mark.parametrize(("kind", "records"), [(Command, _COMMANDS), (Event, _EVENTS)], ids=["commands", "events"])
@given(data=st.data())
def test_any_records_cut_anywhere(kind: object, records: st.SearchStrategy[object], data: st.DataObject) -> None:
    sent = data.draw(st.lists(records, min_size=1, max_size=4))
    stream = b"".join(encode_frame(record) for record in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader: FrameReader[object] = FrameReader(kind)
    got = [
        record
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for record in reader.feed(stream[start:end])
    ]
    assert got == sent
    assert reader.num_missing == 4  # no frame has begun


def one_line_or_records(frame: bytes) -> list[str]:
    """Modules of the records, or the lines of the refusal."""
    reader: FrameReader[Command] = FrameReader(Command)
    try:
        return [type(record).__module__ for record in reader.feed(frame)]
    except FrameError as error:
        return str(error).split("\n")


@given(body=st.binary(max_size=200))
def test_any_bytes_are_a_command_or_refused(body: bytes) -> None:
    assert len(one_line_or_records(struct.pack(">I", len(body)) + body)) == 1


@given(command=_COMMANDS, at=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_frame_is_a_frame_or_refused(command: Command, at: int, value: int) -> None:
    frame = bytearray(encode_frame(command))
    frame[at % len(frame)] = value
    assert len(one_line_or_records(bytes(frame))) <= 1


def test_a_frame_too_long_is_refused_by_its_length_alone() -> None:
    reader: FrameReader[Command] = FrameReader(Command, max_bytes=1000)
    with pytest.raises(FrameError, match="1001 bytes exceeds the limit of 1000"):
        reader.feed(struct.pack(">I", 1001))
    with pytest.raises(FrameError, match=r"Abort of .* bytes exceeds the limit of 10"):
        encode_frame(Abort("a" * 100), max_bytes=10)


def test_what_msgpack_has_no_form_for_is_refused() -> None:
    with pytest.raises(FrameError, match="can't be sent"):
        encode_frame(Abort(object()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "add", "request": {"request_id": "a", "prompt_token_ids": [1], "sampling": {}}},
        {"type": "abort", "request_id": 5},
        {"type": "nothing"},
        {"request_id": "a"},
        [1, 2],
        None,
    ],
)
def test_a_record_of_the_wrong_shape_is_refused(body: object) -> None:
    encoded = msgspec.msgpack.encode(body)
    with pytest.raises(FrameError, match="malformed frame"):
        FrameReader(Command).feed(struct.pack(">I", len(encoded)) + encoded)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"numbers": b"\0" * 16, "token_ids": b"\0" * 4}, "4 bytes of tokens do not fit 16 bytes of choices"),
        ({"numbers": b"\0" * 9, "token_ids": b"\0" * 4}, "4 bytes of tokens do not fit 9"),
        ({"numbers": b"\0" * 8, "token_ids": b"\0" * 5}, "5 bytes of tokens do not fit 8"),
        ({"token_ids": b"\0" * 4}, "4 bytes of tokens do not fit 0"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(columns: dict[str, bytes], reason: str) -> None:
    encoded = msgspec.msgpack.encode({"type": "outputs", "deltas": {"produced_s": 0.0, **columns}})
    with pytest.raises(FrameError, match=reason):
        FrameReader(Event).feed(struct.pack(">I", len(encoded)) + encoded)


def test_sampling_parameters_are_checked_on_arrival() -> None:
    body = {"request_id": "a", "prompt_token_ids": [1], "sampling": {"temperature": -1}, "max_tokens": 3}
    encoded = msgspec.msgpack.encode({"type": "add", "request": body})
    with pytest.raises(FrameError, match="temperature must be between 0 and 100"):
        FrameReader(Command).feed(struct.pack(">I", len(encoded)) + encoded)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("wrong", "prompt"),
        ContextLengthError("too long", "max_tokens"),
        CapacityError("too large"),
        EngineDeadError("dead"),
        QueueFullError("full", 7.5),
    ],
)
def test_errors_survive_the_way(error: RealizarError) -> None:
    restored = restore_error(record_error(error))
    assert (type(restored), str(restored)) == (type(error), str(error))
    assert vars(restored) == vars(error)


def test_other_errors_become_one_line() -> None:
    restored = restore_error(record_error(CheckpointError("a.gguf", "offset 24", "no magic")))
    assert str(restored) == "a.gguf: offset 24: no magic"
    assert str(restore_error(record_error(ValueError("no such\nfile")))) == "ValueError: no such file"
    assert str(restore_error(ErrorRecord("os", "no error of ours"))) == "no error of ours"
    assert str(restore_error(record_error(MemoryError()))) == "MemoryError"


@contextmanager
def channel_pair(*, takes_descriptors: bool = False) -> Iterator[tuple[Channel[Command], socket.socket]]:
    ours, theirs = socket.socketpair()
    channel: Channel[Command] = Channel(ours, Command, takes_descriptors=takes_descriptors)
    with theirs:
        yield channel, theirs
    channel.close()


def test_a_channel_waits_for_the_rest_of_a_frame() -> None:
    frame = encode_frame(Ping())
    with channel_pair() as (channel, theirs):
        for cut in range(1, len(frame)):
            theirs.sendall(frame[:cut])
            assert channel.receive_now() is None
            with pytest.raises(ChannelTimeoutError, match="does not answer"):
                channel.receive(timeout_s=0.0)
            theirs.sendall(frame[cut:] + frame)
            assert (channel.receive(), channel.receive_now()) == (Ping(), Ping())
        theirs.sendall(frame[:-1])
        theirs.close()
        with pytest.raises(ChannelError, match="has ended"):
            channel.receive()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "exceeds the limit"),
        (struct.pack(">I", 1) + b"x", "malformed"),
    ],
)
def test_a_channel_refuses_what_is_no_frame(sent: bytes, reason: str) -> None:
    with channel_pair() as (channel, theirs):
        theirs.sendall(sent)
        with pytest.raises(FrameError, match=reason):
            channel.receive()


def test_a_channel_does_not_wait_for_one_that_does_not_read() -> None:
    large = Abort("a" * (4 << 20))
    with channel_pair() as (channel, theirs):
        channel.post(large)
        assert not channel.flush()
        with pytest.raises(ChannelTimeoutError, match="does not read"):
            channel.send(large, timeout_s=0.0)
        theirs.close()
        with pytest.raises(ChannelError):
            channel.flush()


def test_a_channel_takes_a_descriptor_between_records() -> None:
    read, written = os.pipe()
    with channel_pair(takes_descriptors=True) as (channel, theirs):
        theirs.sendall(encode_frame(Ping()))
        socket.send_fds(theirs, [b"f"], [written])
        theirs.sendall(encode_frame(Abort("b")))
        assert channel.receive() == Ping()
        got = channel.receive_descriptor()
        os.write(got, b"it")
        assert (os.read(read, 9), channel.receive()) == (b"it", Abort("b"))
    for descriptor in (read, written, got):
        os.close(descriptor)

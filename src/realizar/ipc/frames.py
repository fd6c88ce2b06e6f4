"""Frames on a socket: four bytes of length, big-endian, then one msgpack record of a known type. Pickle is not used.

All processes speak in them. `encode_frame` and `FrameReader` are for those that send and receive bytes themselves;
`Channel` has a socket, and deadlines.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 18
_ENCODER = msgspec.msgpack.Encoder()
_Record = TypeVar("_Record")


class ChannelError(Exception):
    """The other end is gone, or this is a `FrameError`. The message is one line."""


class ChannelTimeoutError(ChannelError):
    """The other end does not read or answer in time."""


class FrameError(ChannelError):
    """Received bytes are not a frame, or a record is too large for one."""


def encode_frame(record: Any, max_bytes: int = MAX_FRAME_BYTES) -> bytearray:
    """It raises FrameError if the record takes more than `max_bytes`, or msgpack can't express it."""
    frame = bytearray(_LENGTH.size)
    try:
        _ENCODER.encode_into(record, frame, _LENGTH.size)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a {type(record).__name__} can't be sent: {error}") from error
    size = len(frame) - _LENGTH.size
    if size > max_bytes:
        raise FrameError(f"a {type(record).__name__} of {size} bytes exceeds the limit of {max_bytes} bytes of a frame")
    _LENGTH.pack_into(frame, 0, size)
    return frame


class FrameReader(Generic[_Record]):
    """Decodes frames from received bytes, which may be cut anywhere.

    A record of another type than `record_type` is malformed. A frame of more than `max_bytes` is refused at its header.
    """

    def __init__(self, record_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(record_type)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def num_missing(self) -> int:
        """Bytes until the next frame is whole, as far as its length is known; 0 or less if it is.

        It raises FrameError if the frame is too long.
        """
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > self._max_bytes:
            raise FrameError(f"a frame of {size} bytes exceeds the limit of {self._max_bytes} bytes")
        return _LENGTH.size + int(size) - len(self._buffer)

    def feed(self, data: bytes | bytearray) -> list[_Record]:
        """Decode the records that these bytes complete.

        FrameError: a frame is too long, or a record is not valid or of the type; the reader is unusable after that.
        """
        self.add(data)
        records: list[_Record] = []
        while (record := self.take()) is not None:
            records.append(record)
        return records

    def add(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def take(self) -> _Record | None:
        """The next record if its frame is whole; None if it is not. Raises as `feed`."""
        if self.num_missing > 0:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FrameError(f"a malformed frame: {reason}") from error


class Channel(Generic[_Record]):
    """One end of a pair of sockets. Only one thread may use it at a time.

    The socket never blocks, so that a record that is there costs one call of the system; else it is waited for.

    Args:
        connection: the socket, which the channel owns from now on.
        received_type: the type of received records; other records are errors.
        takes_descriptors: descriptors may come between records, which reading ahead would lose.
    """

    def __init__(self, connection: socket.socket, received_type: Any, *, takes_descriptors: bool = False) -> None:
        connection.setblocking(False)
        self._socket, self._takes_descriptors = connection, takes_descriptors
        self._reader: FrameReader[_Record] = FrameReader(received_type)
        self._unsent = bytearray()  # what was posted and the other end has not read yet

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_record(self) -> bool:
        """True if the next record has come whole, so that it is not waited for on the descriptor."""
        return self._reader.num_missing <= 0

    def post(self, record: Any) -> None:
        """Send a record without waiting; what the other end has no room for is sent by `flush`. Raises ChannelError."""
        frame = encode_frame(record)
        if self._unsent:
            self._unsent += frame
        else:
            self._unsent = frame
        self.flush()

    def flush(self) -> bool:
        """Send what was posted, as far as the other end has room; True if none is left. Raises ChannelError."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelError(str(error)) from error
        return True

    def send(self, record: Any, timeout_s: float | None = None) -> None:
        """Send a record, and wait for room. ChannelError: the other end is gone, or the record is too large.

        ChannelTimeoutError: the other end does not read.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.post(record)
        while not self.flush():
            if not self._wait(select.POLLOUT, deadline_s):
                raise ChannelTimeoutError("it does not read what it is sent")

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file's descriptor with one byte. Raises ChannelError."""
        try:
            socket.send_fds(self._socket, [b"f"], [descriptor])
        except OSError as error:
            raise ChannelError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> _Record:
        """Raises ChannelError: the other end is gone or sent a malformed record. ChannelTimeoutError: none came."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (record := self._reader.take()) is None:
            self._read_more(deadline_s)
        return record

    def wait(self) -> None:
        """Wait until something comes, or the other end is gone."""
        if not self.has_record:
            self._wait(select.POLLIN, None)

    def receive_now(self) -> _Record | None:
        """The next record if it has come whole; None if it has not. Raises ChannelError."""
        if not self.has_record:
            try:
                self._read_more(0.0)
            except ChannelTimeoutError:
                return None
        return self._reader.take()

    def receive_descriptor(self) -> int:
        """Receive the descriptor of an open file, which follows the last record. Raises ChannelError."""
        try:
            self._wait(select.POLLIN, None)
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise ChannelError(str(error)) from error
        if not descriptors:
            raise ChannelError("no open file came")
        return descriptors[0]

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _read_more(self, deadline_s: float | None) -> None:
        try:
            piece = self._socket.recv(self._reader.num_missing if self._takes_descriptors else _READ_BYTES)
        except BlockingIOError:
            if not self._wait(select.POLLIN, deadline_s):
                raise ChannelTimeoutError("it does not answer") from None
        except OSError as error:
            raise ChannelError(str(error)) from error
        else:
            if not piece:
                raise ChannelError("it has ended")
            self._reader.add(piece)
        if deadline_s is not None and time.monotonic() > deadline_s and not self.has_record:
            raise ChannelTimeoutError("it does not answer")

    def _wait(self, event: int, deadline_s: float | None) -> bool:
        """Wait until the socket can be read or written, which it could not be just now; False if the deadline comes
        first.
        """
        left_ms = None if deadline_s is None else 1e3 * (deadline_s - time.monotonic())
        if left_ms is not None and left_ms <= 0:
            return False
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(left_ms))

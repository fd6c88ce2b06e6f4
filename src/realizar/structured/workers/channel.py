"""`Channel` sends and receives records on a socket, with deadlines: a big-endian u32 length, then msgpack."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

MAX_RECORD_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 18
_ENCODER = msgspec.msgpack.Encoder()
_Record = TypeVar("_Record")


class ChannelError(Exception):
    """The other end is gone, or sent a malformed record."""


class ChannelTimeoutError(ChannelError):
    """The other end does not read or answer in time."""


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
        self._decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(received_type)
        self._read = bytearray()  # what has come and was not returned yet
        self._unsent = bytearray()  # what was posted and the other end has not read yet

    def fileno(self) -> int:
        """The socket's descriptor, for waiting on several channels."""
        return self._socket.fileno()

    @property
    def has_record(self) -> bool:
        """True if the next record has come whole, so that it is not waited for on the descriptor."""
        return len(self._read) >= _LENGTH.size and len(self._read) >= _LENGTH.size + self._size()

    def post(self, record: Any) -> None:
        """Send a record without waiting; what the other end has no room for is sent by `flush`. Raises ChannelError."""
        self._unsent += _framed(record)
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
        """Send a record, and wait for room.

        Raises:
            ChannelError: the other end is gone, or the record is too large. ChannelTimeoutError: the other end does
                not read.
        """
        data = memoryview(_framed(record))
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline_s):
                    raise ChannelTimeoutError("it does not read what it is sent") from None
            except OSError as error:
                raise ChannelError(str(error)) from error

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file's descriptor with one byte. Raises ChannelError."""
        try:
            socket.send_fds(self._socket, [b"f"], [descriptor])
        except OSError as error:
            raise ChannelError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> _Record:
        """Receive the next record.

        Raises:
            ChannelError: the other end is gone, or sent a malformed record. ChannelTimeoutError: no record came in
                time.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.has_record:
            self._read_more(deadline_s)
        end = _LENGTH.size + self._size()
        body = bytes(memoryview(self._read)[_LENGTH.size : end])
        del self._read[:end]
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ChannelError(f"a record is malformed: {error}") from error

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
        return self.receive() if self.has_record else None

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
        """Close this end; idempotent."""
        self._socket.close()

    def _size(self) -> int:
        """The length of the next record, whose first bytes have come. Raises ChannelError."""
        size: int = _LENGTH.unpack_from(self._read)[0]
        if size > MAX_RECORD_BYTES:
            raise ChannelError(f"a record of {size} bytes exceeds the limit of {MAX_RECORD_BYTES} bytes")
        return size

    def _read_more(self, deadline_s: float | None) -> None:
        """Take in what has come, or wait for more."""
        try:
            piece = self._socket.recv(self._most_to_read())
        except BlockingIOError:
            if not self._wait(select.POLLIN, deadline_s):
                raise ChannelTimeoutError("it does not answer") from None
        except OSError as error:
            raise ChannelError(str(error)) from error
        else:
            if not piece:
                raise ChannelError("it has ended")
            self._read += piece
        if deadline_s is not None and time.monotonic() > deadline_s and not self.has_record:
            raise ChannelTimeoutError("it does not answer")

    def _most_to_read(self) -> int:
        if not self._takes_descriptors:
            return _READ_BYTES
        end = _LENGTH.size + (self._size() if len(self._read) >= _LENGTH.size else 0)
        return end - len(self._read)

    def _wait(self, event: int, deadline_s: float | None) -> bool:
        """Wait until the socket can be read or written; False if the deadline comes first."""
        poll = select.poll()
        poll.register(self._socket, event)
        left_ms = None if deadline_s is None else max(0.0, 1e3 * (deadline_s - time.monotonic()))
        return bool(poll.poll(left_ms))


def _framed(record: Any) -> bytes:
    body = _ENCODER.encode(record)
    if len(body) > MAX_RECORD_BYTES:
        raise ChannelError(f"a record of {len(body)} bytes exceeds the limit of {MAX_RECORD_BYTES} bytes")
    return _LENGTH.pack(len(body)) + body

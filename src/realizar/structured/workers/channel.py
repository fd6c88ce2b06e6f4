"""`Channel` sends and receives records on a blocking socket, with deadlines: a big-endian u32 length, then msgpack."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

MAX_RECORD_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_Record = TypeVar("_Record")


class ChannelError(Exception):
    """The other end is gone, or sent a malformed record."""


class ChannelTimeoutError(ChannelError):
    """The other end does not read or answer in time."""


class Channel(Generic[_Record]):
    """One end of a pair of sockets. Only one thread may use it at a time.

    Args:
        connection: the socket, which the channel owns from now on.
        received_type: the type of received records; other records are errors.
    """

    def __init__(self, connection: socket.socket, received_type: Any) -> None:
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(received_type)

    def fileno(self) -> int:
        """The socket's descriptor, for waiting on several channels."""
        return self._socket.fileno()

    def send(self, record: Any, timeout_s: float | None = None) -> None:
        """Send a record.

        Raises:
            ChannelError: the other end is gone, or the record is too large. ChannelTimeoutError: the other end does
                not read.
        """
        body = _ENCODER.encode(record)
        if len(body) > MAX_RECORD_BYTES:
            raise ChannelError(f"a record of {len(body)} bytes exceeds the limit of {MAX_RECORD_BYTES} bytes")
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise ChannelTimeoutError("it does not read what it is sent") from error
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
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline_s))
        if size > MAX_RECORD_BYTES:
            raise ChannelError(f"a record of {size} bytes exceeds the limit of {MAX_RECORD_BYTES} bytes")
        try:
            return self._decoder.decode(self._exactly(size, deadline_s))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ChannelError(f"a record is malformed: {error}") from error

    def receive_descriptor(self) -> int:
        """Receive the descriptor of an open file. Raises ChannelError."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise ChannelError(str(error)) from error
        if not descriptors:
            raise ChannelError("no open file came")
        return descriptors[0]

    def close(self) -> None:
        """Close this end; idempotent."""
        self._socket.close()

    def _exactly(self, size: int, deadline_s: float | None) -> bytes:
        data = bytearray()
        try:
            while len(data) < size:
                if deadline_s is not None:
                    self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                else:
                    self._socket.settimeout(None)
                piece = self._socket.recv(min(size - len(data), 1 << 20))
                if not piece:
                    raise ChannelError("it has ended")
                data += piece
        except TimeoutError as error:
            raise ChannelTimeoutError("it does not answer") from error
        except OSError as error:
            raise ChannelError(str(error)) from error
        return bytes(data)

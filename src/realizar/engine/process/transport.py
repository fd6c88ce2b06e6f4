"""Frames on a socket: four bytes of length, big-endian, then one msgpack record of a known type. Pickle is not used."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_Record = TypeVar("_Record")


class FrameError(ValueError):
    """Received bytes are not a frame, or a record is too large for one. The message is one line."""


def encode_frame(record: Any, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Encode a record as a frame.

    Raises:
        FrameError: the record takes more than `max_bytes`, or msgpack can't express it.
    """
    try:
        body = _ENCODER.encode(record)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a {type(record).__name__} can't be sent: {error}") from error
    if len(body) > max_bytes:
        raise FrameError(
            f"a {type(record).__name__} of {len(body)} bytes exceeds the limit of {max_bytes} bytes of a frame"
        )
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[_Record]):
    """Decodes frames from received bytes, which may be cut anywhere.

    Args:
        record_type: the type of the records; any other record is malformed.
        max_bytes: size limit of a frame; a longer frame is refused at its header.
    """

    def __init__(self, record_type: Any, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Record] = msgspec.msgpack.Decoder(record_type)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def mid_frame(self) -> bool:
        """True if a frame has begun and is incomplete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[_Record]:
        """Decode the records that these bytes complete.

        Raises:
            FrameError: a frame is too long, or a record is malformed, unknown or out of range. The reader is unusable
                after that.
        """
        buffer = self._buffer
        buffer += data
        records: list[_Record] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer, start)
            if size > self._max_bytes:
                raise FrameError(f"a frame of {size} bytes exceeds the limit of {self._max_bytes} bytes")
            end = start + _LENGTH.size + size
            if len(buffer) < end:
                break
            records.append(self._decode(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        del buffer[:start]
        return records

    def _decode(self, body: bytes) -> _Record:
        try:
            return self._decoder.decode(body)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise FrameError(f"a malformed frame: {reason}") from error

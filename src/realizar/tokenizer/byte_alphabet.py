"""GPT-2's alphabet: a printable character for every byte. Standard library only."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Map characters to bytes: printable Latin-1 characters to themselves, and U+0100 onwards to the other bytes."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _alphabet()


def spelled_bytes(text: str) -> bytes:
    """The bytes that a token spells; a character outside the alphabet gives its UTF-8 bytes."""
    try:
        return bytes(map(BYTE_OF.__getitem__, text))
    except KeyError:
        return b"".join(bytes((BYTE_OF[c],)) if c in BYTE_OF else c.encode() for c in text)

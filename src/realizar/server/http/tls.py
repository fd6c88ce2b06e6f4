"""TLS of the server's own: certificate and key from files, which are read again when they have changed."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from realizar.errors import RealizarError

_LOG = logging.getLogger(__name__)
_CHECK_S = 1.0  # seconds between looks at the files


def tls_context(certificate: Path, key: Path, clock_s: Callable[[], float] = time.monotonic) -> ssl.SSLContext:
    """A context for a server, which from then on takes renewed files for new connections.

    `certificate` is a PEM file with the certificate and its chain, `key` one of its private key, without a password. It
    raises RealizarError if a file can't be read, or they don't belong together.
    """
    renewing = _Renewing(certificate, key, clock_s)
    renewing.current.sni_callback = renewing.on_hello
    return renewing.current


class _Renewing:
    """The files' latest context. A connection's first context is always the first one, whose callback replaces it."""

    def __init__(self, certificate: Path, key: Path, clock_s: Callable[[], float]) -> None:
        self._certificate, self._key, self._clock_s = certificate, key, clock_s
        self._versions = self._look()
        self._checked_s = clock_s()
        self.current = _load(certificate, key)

    def on_hello(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        now_s = self._clock_s()
        if now_s - self._checked_s >= _CHECK_S:
            self._checked_s = now_s
            self._renew()
        connection.context = self.current

    def _renew(self) -> None:
        versions = self._look()
        if versions in (None, self._versions):
            return
        try:
            self.current = _load(self._certificate, self._key)
        except RealizarError as error:  # one file may be there before the other: the next look tries again
            _LOG.warning("the certificate before goes on: %s", error)
        else:
            self._versions = versions
            _LOG.info("%s has been read again", self._certificate)

    def _look(self) -> tuple[tuple[int, int, int], ...] | None:
        """Facts of the files that differ once one was replaced; None while one is absent."""
        try:
            found = [path.stat() for path in (self._certificate, self._key)]
        except OSError:
            return None
        return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    for path in (certificate, key):
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise RealizarError(f"TLS: {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise RealizarError(f"TLS: {key} is not the key of the certificate in {certificate}") from error
        raise RealizarError(f"TLS: {certificate} and {key} are no certificate and key in PEM: {error}") from error
    except _EncryptedKeyError:
        raise RealizarError(f"TLS: {key} has a password; the server needs a key without one") from None
    return context


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a password."""


def _no_password() -> str:
    raise _EncryptedKeyError

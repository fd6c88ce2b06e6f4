"""HTTPS of the server's own: answers, refusals, renewed files, and files that are wrong."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from realizar.errors import RealizarError
from realizar.server.http import tls
from realizar.server.settings import ServerSettings
from server.http.http_door import Door
from waits import HANG_S

DATA = Path(__file__).parents[2] / "data" / "tls"


def trusting(*names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(DATA / f"{name}.pem")
    return context


def settings(folder: Path, **changes: Any) -> ServerSettings:
    copy("first", folder)
    files = {"tls_certificate": str(folder / "cert.pem"), "tls_key": str(folder / "key.pem")}
    return ServerSettings(log_requests=False, **files, **changes)


def copy(name: str, folder: Path) -> None:
    shutil.copy(DATA / f"{name}.pem", folder / "cert.pem")
    shutil.copy(DATA / f"{name}-key.pem", folder / "key.pem")


async def subject(port: int) -> str:
    """The name in the certificate of a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting("first", "second"))
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(dict(pairs[0] for pairs in certificate["subject"])["commonName"])


def test_answers_and_streams_over_https(tmp_path: Path) -> None:
    async def main() -> None:
        async with Door(settings(tmp_path)) as door, httpx.AsyncClient(verify=trusting("first"), timeout=60) as client:
            url = f"https://127.0.0.1:{door.port}/v1/chat/completions"
            body = {"messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post(url, json=body)).status_code == 200
            assert (await client.post(url, json={**body, "stream": True})).text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{door.port}/health")

    asyncio.run(main())


def test_refusals_of_the_protocol_arrive_over_https(tmp_path: Path) -> None:
    async def main() -> bytes:
        async with Door(settings(tmp_path, max_headers=4)) as door:
            context = trusting("first")
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 9)
            answer = await reader.read()
            writer.close()
            return answer

    assert b"headers_too_large" in asyncio.run(main())


def test_peers_that_never_confirm_the_end_do_not_hold_the_server_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 1e6)
    monkeypatch.setattr("realizar.server.http.protocol._LAST_READ_S", 0.05)
    context = trusting("first")

    def ask(port: int) -> ssl.SSLSocket:
        """A connection that has read its answer, and reads nothing more."""
        connection = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        return connection

    async def main() -> list[ssl.SSLSocket]:
        async with Door(settings(tmp_path)) as door:
            connections = [await asyncio.to_thread(ask, door.port) for _ in range(3)]
            await door.end()
            return connections

    async def bounded() -> list[ssl.SSLSocket]:
        return await asyncio.wait_for(main(), HANG_S)

    for connection in asyncio.run(bounded()):
        connection.close()


def test_a_connection_that_is_closing_already_does_not_break_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport of TLS that is closed twice has lost its connection: it can neither be asked nor ended."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 1e6)
    monkeypatch.setattr("realizar.server.http.protocol._LAST_READ_S", 0.05)
    monkeypatch.setattr("realizar.server.http.protocol._LINGER_S", 0.05)
    context = trusting("first")

    def connect(port: int) -> ssl.SSLSocket:
        """A connection that sends nothing, until its time is over."""
        return context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1")

    async def main() -> ssl.SSLSocket:
        async with Door(settings(tmp_path, header_timeout_s=0.05)) as door:
            connection = await asyncio.to_thread(connect, door.port)
            while not (door.connections() and door.connections()[0].transport.is_closing()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await door.end()
            return connection

    async def bounded() -> ssl.SSLSocket:
        return await asyncio.wait_for(main(), HANG_S)

    asyncio.run(bounded()).close()


def test_renewed_files_are_for_new_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_CHECK_S", 0.0)

    async def main() -> list[str]:
        async with Door(settings(tmp_path)) as door:
            names = [await subject(door.port)]
            shutil.copy(DATA / "second.pem", tmp_path / "cert.pem")  # its key is not there yet
            names.append(await subject(door.port))
            copy("second", tmp_path)
            names.append(await subject(door.port))
            (tmp_path / "cert.pem").unlink()
            names.append(await subject(door.port))
            return names

    assert asyncio.run(main()) == ["first.test", "first.test", "second.test", "second.test"]


def test_files_are_looked_at_once_a_second(tmp_path: Path) -> None:
    times = iter([0.0, 0.5, 1.5])
    copy("first", tmp_path)
    renewing = tls._Renewing(tmp_path / "cert.pem", tmp_path / "key.pem", lambda: next(times))
    copy("second", tmp_path)
    connection, first = Connection(), renewing.current
    renewing.on_hello(connection, None, first)  # type: ignore[arg-type]
    assert connection.context is first
    renewing.on_hello(connection, None, first)  # type: ignore[arg-type]
    assert connection.context is not first


class Connection:
    context: ssl.SSLContext


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("absent.pem", "first-key.pem", "absent.pem: No such file or directory"),
        ("first.pem", "absent.pem", "absent.pem: No such file or directory"),
        ("first.pem", "second-key.pem", "second-key.pem is not the key of the certificate in"),
        ("first.pem", "locked-key.pem", "locked-key.pem has a password"),
        ("first.pem", "first.pem", "are no certificate and key in PEM"),
        ("first-key.pem", "first-key.pem", "are no certificate and key in PEM"),
    ],
)
def test_wrong_files_are_refused_in_one_line(certificate: str, key: str, message: str) -> None:
    with pytest.raises(RealizarError) as caught:
        tls.tls_context(DATA / certificate, DATA / key)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    from realizar.cli.main import app, run_app

    def run(*words: str | Path) -> tuple[int, str]:
        return run_app(app, ["serve", "m", *map(str, words), "--print-config"]), capsys.readouterr().err

    return run


def test_the_command_checks_them_first(call: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((DATA / "first.pem").read_bytes() + (DATA / "first-key.pem").read_bytes())
    assert call("--tls-cert", both) == (0, "")
    assert call("--tls-cert", DATA / "first.pem", "--tls-key", DATA / "first-key.pem") == (0, "")
    status, error = call("--tls-cert", DATA / "first.pem", "--tls-key", DATA / "second-key.pem")
    assert (status, len(error.splitlines())) == (1, 1)
    assert call("--tls-key", DATA / "first-key.pem") == (1, "realizar: --tls-key needs --tls-cert\n")

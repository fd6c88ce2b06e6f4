"""`X-Forwarded-For` is believed as far as trusted proxies wrote it, and counts and log lines follow it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.http.forwarded import TrustedProxies
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

PROXIES = TrustedProxies(("10.0.0.0/8", "2001:db8::5"))
PROXY = "10.0.0.1"


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.9", ["203.0.113.1"], "192.0.2.9"),  # an untrusted peer may write what it likes
        (PROXY, [], PROXY),
        (PROXY, ["203.0.113.1"], "203.0.113.1"),
        (PROXY, ["198.51.100.7, 203.0.113.1"], "203.0.113.1"),  # what stands to the left the client wrote
        (PROXY, ["198.51.100.7, 203.0.113.1, 10.9.9.9"], "203.0.113.1"),  # two proxies
        (PROXY, ["203.0.113.1", "10.9.9.9"], "203.0.113.1"),  # in two headers
        (PROXY, ["10.1.1.1,10.2.2.2"], "10.1.1.1"),  # all are proxies: the farthest
        (PROXY, ["203.0.113.1, nonsense"], PROXY),  # an entry that no proxy wrote ends the walk
        (PROXY, ["203.0.113.1, unknown, 10.2.2.2"], "10.2.2.2"),
        (PROXY, [""], PROXY),
        (PROXY, ["203.0.113.1,"], PROXY),
        (PROXY, ["203.0.113.1:4711"], "203.0.113.1"),
        (PROXY, ["[2001:db8::1]:80"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["203.0.113.1"], "203.0.113.1"),
        ("2001:db8::5", ["2001:db8::6"], "2001:db8::6"),
        ("2001:db8::6", ["203.0.113.1"], "2001:db8::6"),
        ("", ["203.0.113.1"], ""),
        (PROXY, ["10.1.1.1," * 100 + "10.2.2.2"], "10.1.1.1"),
        (PROXY, ["203.0.113.1" + ",10.1.1.1" * 40], "10.1.1.1"),  # no more entries are read than proxies make sense
        (PROXY, ["\xff, 203.0.113.1"], "203.0.113.1"),
    ],
)
def test_the_first_address_from_the_right_that_is_no_proxy(peer: str, forwarded: list[str], client: str) -> None:
    headers = [(b"host", b"x"), *((b"x-forwarded-for", value.encode("latin-1")) for value in forwarded)]
    assert PROXIES.client(peer, headers) == client


def test_a_network_with_host_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="has host bits set"):
        TrustedProxies(("10.0.0.1/8",))


def test_lines_of_the_log_have_the_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "realizar.access")

    async def ask(*trusted: str) -> None:
        app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings(trusted_proxies=trusted))
        transport = httpx.ASGITransport(app, client=(PROXY, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.get("/version", headers={"x-forwarded-for": "203.0.113.1"})

    asyncio.run(ask("10.0.0.0/8"))
    asyncio.run(ask("10.0.0.2"))
    asyncio.run(ask())
    lines = [record for record in caplog.records if record.name == "realizar.access"]
    assert [vars(line)["fields"]["client"] for line in lines] == ["203.0.113.1", PROXY, PROXY]
    assert "client=203.0.113.1" in lines[0].getMessage()

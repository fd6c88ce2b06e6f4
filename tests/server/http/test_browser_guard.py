"""Pages of other origins: their requests are refused, whatever the browser sends along; other clients pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from realizar.cli.options.serve import ServerOptions
from realizar.errors import InvalidRequestError
from server.http.http_door import SETTINGS, Door, at_the_door

LOCAL = ("localhost", "127.0.0.1", "::1")
BODY = b'{"prompt": "x"}'
JSON = "content-type: application/json"


def call(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    body = BODY if method == "POST" else b""
    lines = [f"{method} {path} HTTP/{version}", *headers, "connection: close", f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def check(cases: list[tuple[bytes, int, str]], **settings: Any) -> None:
    async def main(door: Door) -> None:
        for request, status, text in cases:
            answer = await door.exchange(request)
            assert status_of(answer) == status, (request, answer)
            assert text in answer.decode(), (request, answer)

    at_the_door(main, replace(SETTINGS, **settings))


@pytest.mark.parametrize("host", ["llm.example.org:8443", "llm.example.org", "[::2]:8000", "192.0.2.1:80"])
def test_the_name_that_a_refusal_advises_is_one_that_the_option_takes(host: str) -> None:
    request, answers = call("GET", "/v1/models", f"Host: {host}"), list[str]()

    async def main(door: Door) -> None:
        answers.append((await door.exchange(request)).decode())

    at_the_door(main, replace(SETTINGS, allowed_hosts=LOCAL))
    advised = answers[0].partition("--allowed-host ")[2].split()[0]
    check([(request, 200, "")], allowed_hosts=ServerOptions(allowed_host=(advised,)).settings().allowed_hosts)


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models", "/openapi.json", "/version", "/v1/completions"])
def test_hosts_on_a_loopback_address(path: str) -> None:
    """A name that an attacker has resolve to this machine reads nothing."""
    method = "POST" if path == "/v1/completions" else "GET"
    cases = [
        (call(method, path, f"Host: {host}", JSON), 200, "")
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "localhost.")
    ]
    cases += [
        (call(method, path, f"Host: {host}", JSON), 403, "--allowed-host")
        for host in (
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "",
            "127.0.0.1.evil.example",
            "[::2]",
        )
    ]
    cases.append((call(method, path, JSON, version="1.0"), 403, "--allowed-host"))
    cases.append((call(method, path, "Host: localhost", "Host: localhost", JSON), 400, "one Host header"))
    check(cases, allowed_hosts=LOCAL)


def test_probes_have_names_of_their_own() -> None:
    cases = [(call("GET", path, "Host: 10.0.0.7"), 200, "") for path in ("/health", "/ready")]
    cases.append((call("GET", "/health", version="1.0"), 200, ""))
    check(cases, allowed_hosts=LOCAL)


@pytest.mark.parametrize("hosts", [(), ("localhost", "*")])
def test_any_host(hosts: tuple[str, ...]) -> None:
    check([(call("GET", "/metrics", "Host: my.server.example"), 200, "")], allowed_hosts=hosts)


HOST = "Host: localhost:8000"
OLD_BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:60.0) Gecko/20100101 Firefox/60.0"
"""It sends a form's POST without `Origin`, and knows no `Sec-Fetch-Site`."""


def test_pages_of_other_origins() -> None:
    refused = [
        (f"Origin: {origin}", JSON)
        for origin in (
            "https://evil.example",
            "null",
            "http://localhost:3000",
            "http://localhost",
            "file://",
            "http://[",
        )
    ]
    refused += [("Sec-Fetch-Site: cross-site", JSON), ("Sec-Fetch-Site: same-site", JSON)]
    cases = [(call("POST", "/v1/completions", HOST, *headers), 403, "--cors-origin") for headers in refused]
    cases += [(call("GET", "/metrics", HOST, *headers), 403, "--cors-origin") for headers in refused]
    cases.append((call("OPTIONS", "/v1/completions", HOST, "Origin: https://evil.example"), 403, "--cors-origin"))
    passed: list[tuple[str, ...]] = [
        (JSON,),
        ("Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin", JSON),
        ("Origin: https://localhost:8000", JSON),
        ("Sec-Fetch-Site: none", JSON),
    ]
    cases += [(call("POST", "/v1/completions", HOST, *headers), 200, "") for headers in passed]
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    cases += [
        (call("GET", "/", HOST, *link, "Sec-Fetch-Dest: document"), 200, "<html"),
        (call("GET", "/", HOST, *link, "Sec-Fetch-Dest: iframe"), 403, ""),
        (call("POST", "/v1/completions", HOST, *link, "Sec-Fetch-Dest: document", JSON), 403, ""),
        (
            call("POST", "/v1/completions", HOST, "Origin: http://localhost:8000", "Origin: null", JSON),
            400,
            "two origin",
        ),
    ]
    check(cases)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000"], ids=["without the port", "the proxy's own"])
def test_a_proxy_that_changes_the_host(host: str) -> None:
    """The server's own page passes, as its browser says so; pages of others, and of names that are rebound, do not."""
    origin = "Origin: https://llm.example:8443"
    same = (origin, "Sec-Fetch-Site: same-origin", JSON)
    cases = [(call("GET", "/v1/models", f"Host: {host}", *same[:2]), 200, "")]
    cases.append((call("POST", "/v1/completions", f"Host: {host}", *same), 200, ""))
    cases += [
        (call("POST", "/v1/completions", f"Host: {host}", origin, JSON, *site), 403, "--cors-origin")
        for site in ((), ("Sec-Fetch-Site: same-site",), ("Sec-Fetch-Site: cross-site",), ("Sec-Fetch-Site: none",))
    ]
    cases.append((call("POST", "/v1/completions", "Host: llm.example:8443", *same), 403, "--allowed-host"))
    twice = (*same, "Sec-Fetch-Site: cross-site")
    cases.append((call("POST", "/v1/completions", f"Host: {host}", *twice), 400, "two sec-fetch-site"))
    check(cases, allowed_hosts=LOCAL)


def test_origins_that_are_allowed() -> None:
    cross = ("Sec-Fetch-Site: cross-site", JSON)
    check(
        [
            (call("POST", "/v1/completions", HOST, "Origin: https://app.example", *cross), 200, "access-control-allow"),
            (call("POST", "/v1/completions", HOST, "Origin: https://other.example", *cross), 403, ""),
            (call("POST", "/v1/completions", HOST, *cross), 403, ""),
        ],
        cors_origins=("https://app.example",),
    )
    check(
        [
            (call("POST", "/v1/completions", HOST, "Origin: https://any.example", *cross), 200, ""),
            (call("POST", "/v1/completions", HOST, *cross), 200, ""),
        ],
        cors_origins=("*",),
    )


def test_bodies_say_what_they_are() -> None:
    """A page could post without asking first if the type were missing or one that forms have."""
    types = ["", "Content-Type: text/plain", "Content-Type: multipart/form-data; boundary=x", "Content-Type:"]
    cases = [
        (call("POST", path, HOST, *([kind] if kind else [])), 415, "Content-Type: application/json")
        for kind in types
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
    ]
    cases.append((call("POST", "/v1/completions", HOST, "Content-Type: Application/JSON; charset=utf-8"), 200, ""))
    check(cases)


@pytest.mark.parametrize("kind", ["", "Content-Type: application/x-www-form-urlencoded", "Content-Type: text/plain"])
def test_ollamas_clients_need_not_say_what_a_body_is(kind: str) -> None:
    """litellm and curl do not. A page's form says no more, but has an origin: it is refused, the server's own too."""
    said = [HOST, kind] if kind else [HOST]
    own, foreign = f"Origin: http://{HOST.partition(' ')[2]}", "Origin: null"
    cases = [(call("POST", path, *said), 400, "Unrecognized request argument") for path in ("/api/chat", "/api/show")]
    cases += [
        (call("POST", "/api/chat", *said, own), 415, "Content-Type: application/json"),
        (call("POST", "/api/chat", *said, "Sec-Fetch-Site: same-origin"), 415, "Content-Type: application/json"),
        (call("POST", "/api/chat", *said, f"User-Agent: {OLD_BROWSER}"), 415, "Content-Type: application/json"),
        (call("POST", "/api/chat", *said, "User-Agent: curl/8.5.0"), 400, "Unrecognized request argument"),
        (call("POST", "/api/chat", *said, foreign), 403, "--cors-origin"),
        (call("POST", "/api/chat", *said, "Sec-Fetch-Site: cross-site"), 403, "--cors-origin"),
    ]
    check(cases)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("localhost", "127.0.0.1", "::1", "127.0.0.1")),
        ({"host": "0.0.0.0"}, ()),
        ({"host": "::1", "allowed_host": ("llm.lan",)}, ("localhost", "127.0.0.1", "::1", "::1", "llm.lan")),
        ({"host": "0.0.0.0", "allowed_host": ("a",)}, ("localhost", "127.0.0.1", "::1", "0.0.0.0", "a")),
        ({"allowed_host": ("*",)}, ("localhost", "127.0.0.1", "::1", "127.0.0.1", "*")),
    ],
)
def test_what_the_options_allow(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert ServerOptions(**options).settings().allowed_hosts == expected


@pytest.mark.parametrize("host", ["http://x", "x:80", "a b", "", "*.x"])
def test_names_that_are_none(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="--allowed-host"):
        ServerOptions(allowed_host=(host,)).settings()

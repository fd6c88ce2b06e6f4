"""`ServerSettings`: how the server behaves at its door, said once. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.errors import InvalidRequestError

Pooling = Literal["last", "mean"]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. A value out of range raises `InvalidRequestError`.

    Attributes:
        api_keys: any of them opens the API; none leaves it open to everyone who can reach the port.
        cors_origins: origins whose pages may call the API from a browser; `*` is all; none by default.
        allowed_hosts: names that a Host header may have, without port; none, or `*`, takes all.
        embeddings: pooling of `/v1/embeddings`; None takes what the model was made for, and refuses others.
        allow_request_templates: whether a request may bring a chat template of its own.
        allow_request_priority: whether a request may have a priority other than 0, and so pass others.
        max_body_bytes: of a request.
        request_memory_bytes: that large requests, over 32 KiB, may hold together from their first byte to their
            answer's last; a client may have half of it.
        body_timeout_s: time for a request's body to arrive.
        max_header_bytes: of a request line and its headers together.
        header_timeout_s: time for them to arrive.
        max_headers: headers and trailers of a request.
        max_connections: that may be open at once; a peer other than this machine may have half of them.
        keep_alive_s: time that a connection may wait for another request.
        ping_interval_s: between comments that keep an idle stream's connection open.
        write_timeout_s: time for a client to take some of what is sent to it.
        max_prompts: in one request to `/v1/completions` or `/v1/embeddings`.
        max_choices: prompts times `n` of one request.
        web_page: whether the chat page is served at `/`.
        log_requests: whether a line a request is logged.
        traces_endpoint: where OpenTelemetry's traces go, such as `http://collector:4318/v1/traces`; None makes none.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    embeddings: Pooling | None = None
    allow_request_templates: bool = False
    allow_request_priority: bool = False
    max_body_bytes: int = 8 << 20
    request_memory_bytes: int = 96 << 20
    body_timeout_s: float = 30.0
    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 20.0
    max_headers: int = 128
    max_connections: int = 1024
    keep_alive_s: int = 30
    ping_interval_s: float = 10.0
    write_timeout_s: float = 120.0
    max_prompts: int = 2048
    max_choices: int = 4096
    web_page: bool = True
    log_requests: bool = True
    traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "request_memory_bytes",
            "body_timeout_s",
            "max_header_bytes",
            "header_timeout_s",
            "max_headers",
            "max_connections",
            "keep_alive_s",
            "ping_interval_s",
            "write_timeout_s",
            "max_prompts",
            "max_choices",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidRequestError(f"{name} must be above 0, not {value}", name)
        if any(not key or key != key.strip() or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise InvalidRequestError("an API key must be printable ASCII without spaces around it", "api_keys")

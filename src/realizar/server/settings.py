"""`ServerSettings`: the settings of the HTTP server. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from realizar.errors import InvalidRequestError

Pooling = Literal["last", "mean"]
_MOST_WEIGHT = 1000


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. A value out of range raises `InvalidRequestError`.

    Attributes:
        api_keys: accepted API keys; without keys the API is open to everyone who can reach the port.
        key_weights: the share of each key beside the others, in their order; empty gives each the same.
        cache_sharing: who finds a prompt's prefix in the cache: requests of `all` clients, or of the same `key` alone;
            None is `key` where there are several keys, so that no key learns what another one sent.
        cors_origins: origins whose pages may call the API from a browser; `*` is all; empty by default.
        allowed_hosts: names that a Host header may have, without port; an empty list or `*` allows all.
        image_hosts: hosts, maybe with a port, from which images are fetched that requests name by address.
        embeddings: pooling of `/v1/embeddings`; None takes the pooling that the model was trained with, if any.
        allow_request_templates: True if a request may bring its own chat template.
        ignore_unknown_fields: True if fields that nothing knows are left out of requests, and not refused.
        allow_request_priority: True if a request may have a priority other than 0, and so overtake others.
        allow_cache_clearing: True if a request may clear the prefix cache, which is all clients'.
        allow_request_keep_alive: True if a request may say how long its model stays loaded, for all clients.
        max_body_bytes: size of a request's body.
        request_memory_bytes: memory that large requests (over 32 KiB) may hold together, from their first byte to the
            end of their answer; a client may have half of it.
        image_memory_bytes: memory that prompts' images may take together, likewise.
        body_timeout_s: seconds for a request's body to arrive.
        max_header_bytes: size of a request line and its headers together.
        header_timeout_s: seconds for them to arrive.
        max_headers: number of headers and trailers of a request.
        max_connections: number of open connections; a peer that is neither this machine nor a trusted proxy may have
            half of them.
        keep_alive_s: seconds that a connection may wait for another request.
        ping_interval_s: seconds between the comments that keep an idle stream open.
        write_timeout_s: seconds for a client to read some of its answer.
        max_prompts: prompts in one request to `/v1/completions` or `/v1/embeddings`.
        max_choices: prompts times `n` of one request.
        trusted_proxies: networks whose `X-Forwarded-For` tells the client's address; empty believes none.
        tls_certificate, tls_key: PEM files; None serves HTTP without TLS.
        open_metrics: True if `/metrics` needs no key.
        max_stored_responses: number of responses that are kept for later requests; 0 keeps none.
        stored_response_bytes: memory of kept responses.
        web_page: True if the chat page is served at `/`.
        log_requests: True if each request is logged with a line.
        traces_endpoint: OpenTelemetry collector, such as `http://collector:4318/v1/traces`; None sends no traces.
    """

    api_keys: tuple[str, ...] = ()
    key_weights: tuple[int, ...] = ()
    cache_sharing: Literal["all", "key"] | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    image_hosts: tuple[str, ...] = ()
    embeddings: Pooling | None = None
    allow_request_templates: bool = False
    ignore_unknown_fields: bool = False
    allow_request_priority: bool = False
    allow_cache_clearing: bool = False
    allow_request_keep_alive: bool = False
    max_body_bytes: int = 8 << 20
    request_memory_bytes: int = 96 << 20
    image_memory_bytes: int = 2 << 30
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
    trusted_proxies: tuple[str, ...] = ()
    tls_certificate: str | None = None
    tls_key: str | None = None
    open_metrics: bool = False
    max_stored_responses: int = 0
    stored_response_bytes: int = 64 << 20
    web_page: bool = True
    log_requests: bool = True
    traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_0 = getattr(self, field.name), field.name == "max_stored_responses"
            if field.type in ("int", "float") and not (value > 0 or (may_be_0 and value == 0)):
                bound = "at least" if may_be_0 else "above"
                raise InvalidRequestError(f"{field.name} must be {bound} 0, not {value}", field.name)
        if any(not key or key != key.strip() or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise InvalidRequestError("an API key must be printable ASCII without spaces around it", "api_keys")
        if self.key_weights and len(self.key_weights) != len(self.api_keys):
            raise InvalidRequestError("each API key needs a weight, or none has one", "key_weights")
        if self.cache_sharing == "key" and not self.api_keys:
            raise InvalidRequestError("cache_sharing by key needs API keys", "cache_sharing")
        if any(not 1 <= weight <= _MOST_WEIGHT for weight in self.key_weights):
            raise InvalidRequestError(f"an API key's weight must be between 1 and {_MOST_WEIGHT}", "key_weights")

    @property
    def have_own_caches(self) -> bool:
        """True if each key finds its own blocks alone in the prefix cache."""
        return len(self.api_keys) > 1 if self.cache_sharing is None else self.cache_sharing == "key"

    def share(self, place: int, num_processes: int) -> ServerSettings:
        """The settings of one of several API processes: connections and memory of requests are divided evenly.

        Raises InvalidRequestError for fewer connections than processes, or where responses are kept.
        """
        if self.max_stored_responses and num_processes > 1:
            raise InvalidRequestError(
                f"responses can't be kept by {num_processes} API processes: each would have some of them only",
                "stored_responses",
            )
        if self.max_connections < num_processes:
            raise InvalidRequestError(
                f"{num_processes} API processes need as many connections; max_connections is {self.max_connections}",
                "max_connections",
            )
        connections, rest = divmod(self.max_connections, num_processes)
        return replace(
            self,
            max_connections=connections + (place < rest),
            request_memory_bytes=max(self.request_memory_bytes // num_processes, 1),
            image_memory_bytes=max(self.image_memory_bytes // num_processes, 1),
        )

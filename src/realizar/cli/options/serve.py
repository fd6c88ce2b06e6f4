"""Options of `realizar serve`, and their conversion. Many have a second name, known from other servers."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, MaybeInteger, MaybeSize, Size, read_text
from realizar.cli.options.chat_template import ChatTemplateFile
from realizar.cli.terminal.log_lines import LogFormat
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.server.settings import ServerSettings

_MOST_KEY_CHARACTERS = 1 << 20  # of a file
_MAX_REPLICAS = 64
MAX_API_PROCESSES = 64
_CORES_A_PROCESS = 4  # beside the engine, its grammars and whoever asks
_LEAST_BODIES = 4  # of the largest size, in the memory of requests that a process has by default
_REQUEST_BYTES = 96 << 20  # for each replica: as many API processes as one has are behind each
_LOG = logging.getLogger(__name__)


@Parameter(name="*", group="Server", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server.

    Attributes:
        config: TOML file of options, named as here without hyphens in front; REALIZAR_ variables come before it.
        print_config: print every option and where its value is from, as a TOML file, and end.
        host: address to listen on; 0.0.0.0 is every address of this machine.
        port: port to listen on; 0 takes a free one.
        api_key_file: file of keys, one a line, maybe with its share as weight=N; every request needs one of them.
        cache_sharing: whose prompts a key finds in the cache, of all or its own; by default, of several keys, its own.
        served_model_name: name of the model in the API; may be repeated.
        cors_origin: origin whose pages may call the API; may be repeated; * is all.
        api_defaults: default sampling of requests: model uses the Sampling options, openai temperature 1 and top_p 1.
        allowed_host: host name that requests may use; repeatable; * is all. Default all, or localhost on loopback.
        image_host: public host, such as example.org:8443, from which images are fetched by their address; repeatable.
        embeddings: pooling of /v1/embeddings; default the pooling that the model was made for, if any.
        chat_template: file of a Jinja template that replaces the model's own.
        trusted_proxy: address or network of proxies, such as 10.0.0.0/8, whose X-Forwarded-For is read; repeatable.
        allow_request_templates: accept chat templates in requests.
        unknown_fields: what becomes of requests' fields that nothing knows; ignore leaves them out and logs each once.
        allow_request_priority: accept priority in requests (-100 to 100, lower is sooner); clients may overtake others.
        allow_cache_clearing: let clients clear the prefix cache of all, by POST /reset_prefix_cache.
        allow_request_keep_alive: let clients say how long a model stays loaded, or unload it, by Ollama's keep_alive.
        open_metrics: answer /metrics without a key.
        no_web_page: turn off the chat page at /.
        max_body_bytes: maximum size of a request's body, such as 8M.
        request_memory: memory of requests over 32 KiB until answered; default 96M a replica; a client may have half.
        image_memory: memory of prompts' images, encoded or not, until they are answered; a client may have half of it.
        stored_responses: number of responses that are kept for requests with previous_response_id; 0 keeps none.
        stored_response_memory: memory of kept responses; the least recently used of who has the most are dropped.
        max_connections: connections open at once; more are answered 503. Another machine may have half of them.
        api_processes: processes that answer requests; default 1, or one for four cores beside a GPU, up to 3 a replica.
        replicas: engines of the model, each with its GPUs or its share of the cores; requests go where their prefix is.
        tls_cert: PEM file of a certificate and its chain, for HTTPS; read again when it has changed.
        tls_key: PEM file of the certificate's key; default the file of --tls-cert.
        log_level: lowest level of log lines; info has a line for each request.
        log_format: form of log lines.
        traces_endpoint: address for OpenTelemetry's traces, such as http://collector:4318/v1/traces.
    """

    config: Path | None = None
    print_config: bool = False
    host: str = "127.0.0.1"
    port: Integer = 8000
    api_key_file: Path | None = None
    cache_sharing: Literal["all", "key"] | None = None
    served_model_name: Annotated[tuple[str, ...], Parameter(name=("--served-model-name", "--alias"))] = ()
    cors_origin: Annotated[tuple[str, ...], Parameter(name=("--cors-origin", "--allowed-origins"))] = ()
    api_defaults: Literal["model", "openai"] = "model"
    allowed_host: Annotated[tuple[str, ...], Parameter(name="--allowed-host")] = ()
    image_host: Annotated[tuple[str, ...], Parameter(name=("--image-host", "--allowed-media-domains"))] = ()
    embeddings: Literal["last", "mean"] | None = None
    chat_template: ChatTemplateFile = None
    trusted_proxy: Annotated[tuple[str, ...], Parameter(name="--trusted-proxy")] = ()
    allow_request_templates: bool = False
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    allow_request_priority: bool = False
    allow_cache_clearing: bool = False
    allow_request_keep_alive: bool = False
    open_metrics: bool = False
    no_web_page: bool = False
    max_body_bytes: Size = 8 << 20
    request_memory: MaybeSize = None
    image_memory: Size = 2 << 30
    stored_responses: Integer = 0
    stored_response_memory: Size = 64 << 20
    max_connections: Integer = 1024
    api_processes: MaybeInteger = None
    replicas: Annotated[Integer, Parameter(name=("--replicas", "--data-parallel-size"))] = 1
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = "text"
    traces_endpoint: Annotated[str | None, Parameter(name=("--traces-endpoint", "--otlp-traces-endpoint"))] = None

    def settings(self) -> ServerSettings:
        """RealizarError: the keys can't be read. InvalidRequestError: a key, an origin or an address is invalid."""
        for origin in self.cors_origin:
            if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise InvalidRequestError(
                    f"--cors-origin must be * or an origin such as https://example.org, not {origin!r}", "cors_origin"
                )
        if self.traces_endpoint is not None and not re.match(r"https?://[^/]", self.traces_endpoint):
            raise InvalidRequestError(
                f"--traces-endpoint must be an HTTP address, not {self.traces_endpoint!r}", "traces_endpoint"
            )
        self._check_proxies()
        if self.api_processes is not None and not 1 <= self.api_processes <= MAX_API_PROCESSES:
            raise InvalidRequestError(
                f"--api-processes must be between 1 and {MAX_API_PROCESSES}, not {self.api_processes}", "api_processes"
            )
        check_replicas(self.replicas)
        from realizar.server.settings import ServerSettings

        keys = {} if self.api_key_file is None else read_keys(self.api_key_file)
        # Options of the same name have a setting's value.
        same = {each.name for each in fields(ServerSettings)} & {each.name for each in fields(self)}
        return ServerSettings(
            api_keys=tuple(keys),
            key_weights=tuple(keys.values()),
            cors_origins=self.cors_origin,
            allowed_hosts=self._hosts(),
            image_hosts=self._image_hosts(),
            ignore_unknown_fields=self.unknown_fields == "ignore",
            trusted_proxies=self.trusted_proxy,
            web_page=not self.no_web_page,
            request_memory_bytes=self._request_memory_bytes,
            image_memory_bytes=self.image_memory,
            max_stored_responses=self.stored_responses,
            stored_response_bytes=self.stored_response_memory,
            **{name: getattr(self, name) for name in same} | self._tls(),
        )

    @property
    def _request_memory_bytes(self) -> int:
        return self.replicas * _REQUEST_BYTES if self.request_memory is None else self.request_memory

    def num_api_processes(self, device: str) -> int:
        """Processes that answer the requests of one model on a device, which is named as in `--device`.

        One is the bound of a small model on a GPU. By default none gets so little of the memory of requests that a
        client's half of it has no room for two of the largest bodies.
        """
        from realizar.backends.cgroup import processor_quota
        from realizar.backends.device_choice import gpu_listed
        from realizar.backends.machine import allowed_cpus

        if self.api_processes is not None:
            return self.api_processes
        if self.stored_responses or device == "cpu" or (device == "auto" and not gpu_listed()):
            return 1
        cores = min(len(allowed_cpus()), processor_quota() or math.inf)
        room = self._request_memory_bytes // (_LEAST_BODIES * max(self.max_body_bytes, 1))
        return int(max(1, min(cores // _CORES_A_PROCESS, room, self.max_connections)))

    def _check_proxies(self) -> None:
        for network in self.trusted_proxy:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise InvalidRequestError(
                    f"--trusted-proxy must be an address or a network such as 10.0.0.0/8: {error}", "trusted_proxy"
                ) from error

    def _tls(self) -> dict[str, str]:
        """The settings of certificate and key, which belong together."""
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise InvalidRequestError("--tls-key needs --tls-cert", "tls_key")
            return {}
        from realizar.server.http.tls import tls_context

        key = self.tls_key or self.tls_cert
        tls_context(self.tls_cert, key)
        return {"tls_certificate": str(self.tls_cert.absolute()), "tls_key": str(key.absolute())}

    def _hosts(self) -> tuple[str, ...]:
        """Allowed host names. Empty allows all: the server is reachable from other machines and no name is given."""
        from realizar.server.http.clients import is_loopback

        for host in self.allowed_host:
            if host != "*" and not re.fullmatch(r"\[[0-9a-fA-F:.]+\]|[^\s/:@*\[\]]+|[0-9a-fA-F:.]+", host):
                raise InvalidRequestError(
                    f"--allowed-host must be * or a name without scheme and port, not {host!r}", "allowed_host"
                )
        if not self.allowed_host and not is_loopback(self.host):
            return ()
        return ("localhost", "127.0.0.1", "::1", self.host, *self.allowed_host)

    def _image_hosts(self) -> tuple[str, ...]:
        for host in self.image_host:
            if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@*\[\]]+)(:[0-9]{1,5})?", host):
                raise InvalidRequestError(
                    f"--image-host must be a name without scheme, maybe with a port, not {host!r}", "image_host"
                )
        return tuple(host.lower() for host in self.image_host)


def check_replicas(count: int) -> None:
    if not 1 <= count <= _MAX_REPLICAS:
        raise InvalidRequestError(f"--replicas must be between 1 and {_MAX_REPLICAS}, not {count}", "replicas")


def read_keys(path: Path) -> dict[str, int]:
    """Read a file of keys, one a line, with their weights; empty lines and lines that start with # are ignored.

    `weight=N` after a key is its weight, else 1. It raises RealizarError if the file has no key, a weight is no number,
    or it can't be read or is too large.
    """
    content = read_text(path, _MOST_KEY_CHARACTERS, "api_key_file")
    if len(content) > _MOST_KEY_CHARACTERS:
        raise RealizarError(f"{path} is larger than the {format_bytes(_MOST_KEY_CHARACTERS)} of a key file")
    with suppress(OSError):  # it may be gone again
        if path.stat().st_mode & 0o004:
            _LOG.warning("every user of this machine may read %s", path)
    keys: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, content.splitlines()), 1):
        if line and not line.startswith("#"):
            key, *weights = re.split(r"\s+weight=(?=\S*$)", line)
            if any(not re.fullmatch(r"[0-9]{1,9}", weight) for weight in weights):
                raise RealizarError(f"{path}: the weight in line {number} is not a whole number")
            keys[key] = int(weights[0]) if weights else 1
    if not keys:
        raise RealizarError(f"{path} holds no key")
    return keys

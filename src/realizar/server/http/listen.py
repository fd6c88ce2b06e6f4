"""uvicorn's configuration: bounded connections, and no headers that describe the machine."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from realizar.server.http.protocol import bounded_protocol
from realizar.server.http.tls import tls_context
from realizar.server.settings import ServerSettings


def uvicorn_config(app: Starlette, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """`options` are those of `uvicorn.Config`, such as host, port or fd."""
    defaults: dict[str, Any] = {
        "http": bounded_protocol(settings, app.state.figures.refused),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "ssl_context_factory": _tls_factory(settings),
        "timeout_keep_alive": settings.keep_alive_s,
    }
    return uvicorn.Config(app, **{**defaults, **options})


def _tls_factory(settings: ServerSettings) -> Callable[..., ssl.SSLContext] | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    return lambda *_: tls_context(Path(certificate), Path(key))

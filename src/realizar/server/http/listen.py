"""uvicorn's configuration: bounded connections, and no headers that describe the machine."""

from __future__ import annotations

from typing import Any

import uvicorn
from starlette.applications import Starlette

from realizar.server.http.protocol import bounded_protocol
from realizar.server.settings import ServerSettings


def uvicorn_config(app: Starlette, settings: ServerSettings, **options: Any) -> uvicorn.Config:
    """Make a configuration for `uvicorn.Server`.

    Args:
        app: of `create_app`.
        options: options of `uvicorn.Config`, such as host, port or fd.
    """
    defaults: dict[str, Any] = {
        "http": bounded_protocol(settings, app.state.figures.refused),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": settings.keep_alive_s,
    }
    return uvicorn.Config(app, **{**defaults, **options})

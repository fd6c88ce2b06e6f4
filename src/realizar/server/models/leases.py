"""`ModelLeaseMiddleware` gives the models of a request back when its answer is complete or its client is gone."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from realizar.server.models.models import ModelLease


class ModelLeaseMiddleware:
    """Gives every request a list for its leases, in `scope["state"]["model_leases"]`, and releases them at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        leases: list[ModelLease] = []
        scope["state"]["model_leases"] = leases
        try:
            await self._app(scope, receive, send)
        finally:
            for lease in leases:
                lease.release()

"""Figures of the server itself, whichever model a request is for: its answers, its errors, its process, its build."""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector

from realizar import __version__
from realizar.server.errors import ApiError
from realizar.server.metrics import MetricSamples, collected

_UNNAMED = "other"


class ServerFigures:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "realizar:http_requests", "Requests that ended, by HTTP status.", ["status"], registry=self._registry
        )
        self._errors = Counter(
            "realizar:request_errors", "Refusals and errors, by kind.", ["status", "code"], registry=self._registry
        )

    def ended(self, status: int, *, disconnected: bool) -> None:
        """Count a request that has its answer, or whose client left before."""
        self._answers.labels("disconnected" if disconnected else str(status)).inc()

    def failed(self, status: int, code: str | None) -> None:
        """Count a refusal or an error, which may also come in the midst of a stream."""
        self._errors.labels(str(status), code or _UNNAMED).inc()

    def refused(self, error: ApiError) -> None:
        """Count a connection or a request that was refused before it came to the application."""
        self.failed(error.status, error.code)

    def samples(self) -> tuple[MetricSamples, ...]:
        return collected(self._registry)


def own_samples() -> tuple[MetricSamples, ...]:
    """Figures of this process and of the program, under the names that Prometheus' clients give them."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("realizar_build", "The program's version, and Python's.", registry=registry)
    build.info({"version": __version__, "python": platform.python_version()})
    return collected(registry)

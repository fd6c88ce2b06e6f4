"""Starting and stopping an application in a cluster of Ray's. Ray is imported when that begins."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from realizar.errors import RealizarError
from realizar.ray import require_ray
from realizar.ray.options import RayOptions

APPLICATION = "realizar"
_LOCAL_STORE_BYTES = 256 << 20  # of a cluster that is started here: requests and answers are small


@dataclass(frozen=True, slots=True)
class Door:
    """Where Ray Serve's proxies listen, one on each host that has a replica. `tls` is certificate and key."""

    host: str
    port: int
    tls: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RunningApplication:
    """An application that answers requests; `names` are the model's in the API.

    `placement` is what one engine takes, in words; `owns_cluster`: the cluster was started for it.
    """

    names: Sequence[str]
    placement: str
    owns_cluster: bool


def start_application(model: str, options: RayOptions, door: Door, address: str | None) -> RunningApplication:
    """Start an application of a model (`realizar.ray.build_app`), and wait until it answers requests.

    `address` is the cluster's; None takes RAY_ADDRESS, else this host's, which is started if there is none. It raises
    RealizarError if Ray Serve is not installed, the cluster can't be reached, or the model can't be loaded.
    """
    require_ray()
    from ray import serve

    from realizar.ray.deployments import make_application, plan_model

    planned = plan_model(model, options)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    owns_cluster = _connect(address)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray has put its own in their place
        serve.start(proxy_location="EveryNode", http_options=_http_options(door))
        serve.run(make_application(planned, options), name=APPLICATION, route_prefix="/", blocking=False)
    except BaseException as error:
        with suppress(Exception):  # there may be none yet, or no cluster any more
            serve.delete(APPLICATION, _blocking=False)
        _leave(owns_cluster=owns_cluster)
        if isinstance(error, RuntimeError):
            raise RealizarError(f"Ray Serve did not start {model}: {_last_line(error)}") from error
        raise
    return RunningApplication(planned.names, planned.placement.shown(), owns_cluster)


def stop_application(application: RunningApplication) -> None:
    from ray import serve

    serve.delete(APPLICATION)
    _leave(owns_cluster=application.owns_cluster)


def _connect(address: str | None) -> bool:
    """Join a cluster; True if it was started here."""
    import ray

    ray_errors: tuple[type[Exception], ...] = (ConnectionError, RuntimeError, ValueError)
    try:
        try:
            ray.init(address=address or "auto", logging_level="warning")
        except ConnectionError:
            if address is not None:
                raise
        else:
            return False
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            logging_level="warning",
            include_dashboard=False,
            object_store_memory=_LOCAL_STORE_BYTES,
        )
    except ray_errors as error:
        raise RealizarError(f"no cluster of Ray's can be used: {_last_line(error)}") from error
    return True


def _leave(*, owns_cluster: bool) -> None:
    import ray
    from ray import serve

    if owns_cluster:
        serve.shutdown()
    ray.shutdown()


def _http_options(door: Door) -> Any:
    from ray.serve.config import HTTPOptions

    certificate, key = door.tls or (None, None)
    return HTTPOptions(host=door.host, port=door.port, ssl_certfile=certificate, ssl_keyfile=key)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

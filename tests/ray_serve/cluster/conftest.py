"""A cluster of two hosts on this machine, and SmolLM2 served by it. `make test-ray` runs these tests alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from realizar.config import EngineConfig
from realizar.ray.options import RayOptions
from realizar.server.settings import ServerSettings
from server_thread import CONTEXT, NAMES

ENGINE_CPUS = 1
RUNNING = 4  # choices that an engine runs at once


class TwoHosts:
    """A head with the fronts and room for one engine, and another host with room for two. Attributes: url: of the API.

    Its memory for objects is small: requests and answers are.
    """

    def __init__(self, model: Path) -> None:
        from ray.cluster_utils import Cluster

        self._model, store = model, {"object_store_memory": 80 << 20, "include_dashboard": False}
        self._node: dict[str, Any] = {"num_cpus": 2 * ENGINE_CPUS, "memory": 4 << 30, **store}
        head = {"num_cpus": ENGINE_CPUS, "memory": 4 << 30, "resources": {"fronts": 1}, **store}
        self._cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
        self.other = self._cluster.add_node(**self._node)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def serve(self, **fields: Any) -> None:
        """Start the application, or change its options."""
        from ray import serve
        from ray.serve.config import HTTPOptions

        from realizar.ray import build_app

        options = RayOptions(
            names=NAMES,
            config=EngineConfig(
                device="cpu",
                threads=ENGINE_CPUS,
                context_length=CONTEXT,
                max_running=RUNNING,
                kv_cache_bytes=200 << 20,
            ),
            settings=ServerSettings(embeddings="last", max_body_bytes=4 << 20, log_requests=False),
            front_resources={"fronts": 1},
            drain_s=60.0,
            **fields,
        )
        # Both proxies are on one machine here: the head's has the port.
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=self._port))
        serve.run(build_app(str(self._model), options), name="realizar", route_prefix="/", blocking=False)

    def kill_other(self) -> None:
        """End the other host as a power failure would."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def add_other(self) -> None:
        self.other = self._cluster.add_node(**self._node)

    def engines(self) -> list[Any]:
        """The figures of every engine."""
        from ray import serve

        answers = serve.get_deployment_handle("engine", "realizar").broadcast("stats").results(timeout_s=30)
        return [stats for _, stats in answers]

    def num_engines(self) -> int:
        from ray import serve

        states = serve.status().applications["realizar"].deployments["engine"].replica_states
        return int(states.get("RUNNING", 0))

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def _running(model: Path, **fields: Any) -> Iterator[TwoHosts]:
    hosts = TwoHosts(model)
    try:
        hosts.serve(**fields)
        yield hosts
    finally:
        hosts.close()


@pytest.fixture(scope="session", autouse=True)
def _no_reports() -> None:
    """Ray sends no figures of its use, and workers find the tests' package."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture
def hosts(smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    """Args of the fixture's parameter are fields of `RayOptions`."""
    with _running(smollm2_path, **request.param) as running:
        yield running

"""Options of a server on many hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer
from realizar.cli.options.serve import ServerOptions
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.ray.options import RayOptions
    from realizar.server.settings import ServerSettings

_OWN_DOOR = ("max_connections",)
_OWN_LOG = ("log_format",)


@Parameter(name="*", group="Ray", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class RayServingOptions:
    """Options of a server whose engines Ray Serve starts, on many hosts.

    Attributes:
        ray: serve with Ray Serve: engines on the hosts of a cluster of Ray's, as many as the requests need.
        ray_address: address of the cluster's head; default RAY_ADDRESS, else this host's cluster, which may be started.
        min_replicas: engines that run in any case.
        max_replicas: engines that run when many requests wait; default --min-replicas.
        target_requests: open requests of an engine beyond which another starts; default as many as can run.
    """

    ray: bool = False
    ray_address: str | None = None
    min_replicas: Integer = 1
    max_replicas: Annotated[Integer | None, Parameter(name="--max-replicas")] = None
    target_requests: float | None = None

    def checked(self, server: ServerOptions, *, several: bool) -> bool:
        """True if Ray Serve is wanted.

        Raises:
            InvalidRequestError: an option does not suit that.
        """
        if not self.ray:
            for name in ("ray_address", "min_replicas", "max_replicas", "target_requests"):
                if getattr(self, name) != getattr(RayServingOptions(), name):
                    raise InvalidRequestError(f"--{name.replace('_', '-')} is for --ray", name)
            return False
        if server.replicas > 1:
            raise InvalidRequestError("--replicas are for one host; --ray takes --min-replicas", "replicas")
        if several:
            raise InvalidRequestError("--ray serves a single model", "ray")
        for names, whose in ((_OWN_DOOR, "connections"), (_OWN_LOG, "the log's form")):
            for name in names:
                if getattr(server, name) != getattr(ServerOptions(), name):
                    option = f"--{name.replace('_', '-')}"
                    raise InvalidRequestError(f"{option} can't hold with --ray: {whose} are Ray Serve's", name)
        return True

    def options(self, settings: ServerSettings, fronts: int) -> RayOptions:
        """The application's options as far as they stand here. Args: fronts: processes that answer requests.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        from realizar.ray.options import RayOptions

        return RayOptions(
            settings=replace(settings, tls_certificate=None, tls_key=None),
            min_replicas=self.min_replicas,
            max_replicas=self.min_replicas if self.max_replicas is None else self.max_replicas,
            target_requests=self.target_requests,
            fronts=fronts,
        )


def cluster_files(server: ServerOptions) -> tuple[str, str] | None:
    """Paths of the certificate and its key, which every host needs that takes connections."""
    if server.tls_cert is None:
        return None
    found: tuple[Path, Path] = (server.tls_cert, server.tls_key or server.tls_cert)
    return str(found[0].absolute()), str(found[1].absolute())

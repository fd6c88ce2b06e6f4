"""A rolling restart: engines are replaced one by one, and the others take the requests meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from realizar.replicas.replica import Replica

_LOG = logging.getLogger(__name__)


class Renewable(Protocol):
    """Replicas whose engines can be replaced."""

    @property
    def replicas(self) -> Sequence[Replica]: ...

    def drain(self, replica: Replica) -> None:
        """Give a replica that is ready no more requests."""

    async def renew(self, replica: Replica) -> None:
        """Replace the engine of a replica that has no request."""

    async def wait_changed(self) -> None:
        """Wait until a replica's state or its requests may have changed."""


async def replace_in_turn(link: Renewable) -> None:
    """Replace every engine. Each gets no new requests, ends those that it has, and the next waits until it is ready.

    One that dies meanwhile is replaced by its own link. The last one that is ready is never drained, and one that
    drains goes on where the others die.
    """
    _LOG.warning("%d replicas are restarted one by one", len(link.replicas))
    for replica in link.replicas:
        while not _has_other(link, replica):
            await link.wait_changed()
        if replica.state == "ready":
            link.drain(replica)
            _LOG.warning("replica %s ends its %d requests", replica.name, len(replica.requests))
        while replica.state == "draining" and (replica.requests or not _has_other(link, replica)):
            await link.wait_changed()
        if replica.state == "draining":
            await link.renew(replica)
        while replica.state != "ready":
            await link.wait_changed()
        _LOG.warning("replica %s is restarted", replica.name)
    _LOG.warning("all replicas are restarted")


def _has_other(link: Renewable, replica: Replica) -> bool:
    """True if another one takes the requests."""
    return any(other.state == "ready" for other in link.replicas if other is not replica)

"""`PrefixRequestRouter`: Ray Serve's request router of the engines' deployment, which decides as `PrefixRouter` does.

It runs in each front, and learns what replicas hold from their routing statistics, by Ray Serve's controller.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from realizar.ray.reported_keys import RouteWish, read_report
from realizar.replicas.routing import PrefixRouter, ReplicaLoad


class PrefixRequestRouter(RequestRouter):
    """See `RequestRouter` for the methods, which Ray Serve calls on one loop."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once, with `block_tokens`: tokens of a block of the engines' prefix caches."""
        self._router = PrefixRouter(kwargs["block_tokens"])
        self._sent: dict[str, list[RouteWish]] = {}  # by replica: requests of this front that are open
        self._numbers: dict[str, tuple[int, int]] = {}  # of the last report of each

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with all running replicas, when one of them comes, goes or reports."""
        names = {_name(replica.replica_id) for replica in replicas}
        for gone in set(self._router.replicas) - names:
            self._forget(gone)
        for replica in replicas:
            self._take_report(replica)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called when a replica is found dead before the controller has noticed."""
        self._forget(_name(replica_id))
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best replica, then all others: one that is full, or does not answer, passes the request on."""
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        wish = _wish_of(pending_request)
        if wish is None or not by_name:
            return [candidate_replicas]
        loads = {
            name: self._load(replica) for name, replica in by_name.items() if name != wish.avoided or len(by_name) == 1
        }
        route = self._router.choose(wish.keys, wish.num_tokens, loads)
        if route is None:
            return [candidate_replicas]
        self._note_sent(route.replica, wish)
        others = [replica for name, replica in by_name.items() if name != route.replica]
        return [[by_name[route.replica]], others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called when a replica has taken a request, which need not be the best one."""
        wish = _wish_of(pending_request)
        if wish is not None:
            self._note_sent(_name(replica_id), wish)

    def _take_report(self, replica: RunningReplica) -> None:
        name, report = _name(replica.replica_id), read_report(replica.routing_stats)
        self._sent.setdefault(name, [])
        if report is None:
            self._router.begin(name, 0)
        elif self._numbers.get(name) != (report.incarnation, report.number):
            self._numbers[name] = (report.incarnation, report.number)
            self._router.begin(name, report.incarnation)
            self._router.report(name, report)

    def _forget(self, name: str) -> None:
        self._router.leave(name)
        self._sent.pop(name, None)
        self._numbers.pop(name, None)

    def _load(self, replica: RunningReplica) -> ReplicaLoad:
        """The open requests of this front, or as many as the replica last said that it has of all fronts."""
        name, num_known = _name(replica.replica_id), self.replica_queue_len_cache.get(replica.replica_id) or 0
        wishes = self._sent[name] = [wish for wish in self._sent.get(name, ()) if not wish.has_ended]
        waiting = sum(wish.num_tokens for wish in wishes if not wish.has_begun)
        return ReplicaLoad(waiting, max(sum(wish.num_choices for wish in wishes), num_known))

    def _note_sent(self, name: str, wish: RouteWish) -> None:
        """Count a request as one of a replica, and of no other."""
        for other, wishes in self._sent.items():
            if other != name and wish in wishes:
                wishes.remove(wish)
        if wish not in self._sent.setdefault(name, []):
            self._sent[name].append(wish)
        self._router.placed(name, wish.keys)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _wish_of(request: PendingRequest | None) -> RouteWish | None:
    found = None if request is None else next((part for part in request.args if isinstance(part, RouteWish)), None)
    return found if isinstance(found, RouteWish) else None

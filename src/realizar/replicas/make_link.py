"""`make_replica_link` makes the engines of a server with replicas, none of which is started yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec

from realizar.checkpoint.model_files import ModelFiles
from realizar.engine.process import supervisor
from realizar.engine.process.messages import Load
from realizar.replicas.link import ReplicaLink
from realizar.replicas.places import Place
from realizar.replicas.planning import PlannedReplica


def make_replica_link(load: Load, planned: Sequence[PlannedReplica], files: ModelFiles) -> ReplicaLink:
    """Make the link to engines in processes of their own.

    Args:
        load: of the model; the plan's configurations replace its own.
        planned: a replica each.
        files: of the model.
    """
    return ReplicaLink(
        [
            partial(supervisor.ProcessLink, _load_of(load, each), files=files, label=f"replica {number}")
            for number, each in enumerate(planned)
        ]
    )


def _load_of(load: Load, planned: PlannedReplica) -> Load:
    return msgspec.structs.replace(
        load,
        config=planned.config,
        fit_context=planned.fit_context,
        cores=planned.place.cpus,
        visible_gpus=visible_gpus(planned.place, os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def visible_gpus(place: Place, ours: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a replica: its GPU, by the name that it has where this process sees some alone.

    Args:
        ours: the value of this process.
    """
    if place.gpu is None:
        return None
    names = [each.strip() for each in (ours or "").split(",") if each.strip()]
    return names[place.gpu.index] if place.gpu.index < len(names) else str(place.gpu.index)

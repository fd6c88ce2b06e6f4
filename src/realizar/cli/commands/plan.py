"""`realizar plan` shows the memory that a model takes and the requests that fit. It reads only headers of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.commands.inspect import file_bytes, parameters_text
from realizar.cli.options.arguments import Integer, Json, MaybeSize, Model
from realizar.cli.options.engine import BatchingOptions, DraftOptions, EngineOptions
from realizar.cli.options.loading import PlannedModel, planned_model
from realizar.cli.options.serve import check_replicas
from realizar.errors import CapacityError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.backends.memory_plan import MemoryPlan
    from realizar.backends.resolved_config import ResolvedConfig
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.config import EngineConfig
    from realizar.engine.draft_models import DraftedModel
    from realizar.engine.fetch_speed import FetchSpeed
    from realizar.models.parameters import ParameterCounts
    from realizar.replicas.planning import PlannedReplica


def plan_command(
    model: Model,
    /,
    *,
    memory: Annotated[
        MaybeSize,
        Parameter(
            help="Free memory to plan for, such as 32G, here or on a GPU that is not there; default what is free."
        ),
    ] = None,
    replicas: Annotated[
        Integer,
        Parameter(
            name=("--replicas", "--data-parallel-size"),
            help="Engines on this machine; the figures are of each one's share, and --memory is of all, or of a GPU.",
        ),
    ] = 1,
    as_json: Json = False,
    batching: BatchingOptions | None = None,
    drafts: DraftOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Show the memory that weights, workspace and KV cache take, and how many requests fit.

    Options are those of `realizar serve`. A model on a hub is not fetched: of its files the headers are read. Exit
    status 1 if nothing fits.
    """
    check_replicas(replicas)
    config = (batching or BatchingOptions()).config((engine or EngineOptions()).config())
    config = (drafts or DraftOptions()).config(config)
    drafter, is_auto = config.draft_model, config.drafter == "auto"
    with ExitStack() as opened:
        planned = opened.enter_context(planned_model(model, vocabulary=drafter is not None, drafter=is_auto))
        if drafter is not None:
            beside = opened.enter_context(planned_model(drafter, vocabulary=True))
            config = replace(config, drafter=str(beside.checkpoint.path.absolute()))
        _show_plan(planned, config, replicas, memory, as_json=as_json)


def _show_plan(model: PlannedModel, config: EngineConfig, replicas: int, memory: int | None, *, as_json: bool) -> None:
    from realizar.backends.device_choice import choose_planned_device
    from realizar.backends.select import plan_memory
    from realizar.engine.draft_models import resolve_drafted
    from realizar.engine.fetch_speed import known_speed
    from realizar.models.parameters import count_parameters

    chosen = choose_planned_device(config.device, memory_given=memory is not None) if replicas == 1 else None
    checkpoint = model.checkpoint
    beside: list[str] = []
    more: dict[str, object] = {}
    if replicas > 1:
        from realizar.replicas.planning import ReplicaQuestion, divide

        planned = divide(ReplicaQuestion(str(checkpoint.path), config, replicas, memory))
        beside = _replica_lines(checkpoint, planned, context_given=config.context_length is not None)
        more = {"replicas": list(map(_replica_facts, planned))}
        least = _least_of(planned)
        config, memory = least.config, least.memory_bytes
    drafted = resolve_drafted(checkpoint, config, chosen, memory)
    spec, resolved, others, _ = drafted
    plan = plan_memory(spec, checkpoint, resolved, memory, others)
    speed = known_speed(checkpoint.path, resolved) if plan.num_host_snapshots else None
    counts = count_parameters(spec)
    if as_json:
        more["fetch_speed"] = None if speed is None else asdict(speed)
        more |= {"fetched": model.remote_bytes is None, "read_bytes": model.read_bytes}
        more["drafter"] = others["drafter"].checkpoint.path.name if others else None
        size = file_bytes(checkpoint) if model.remote_bytes is None else model.remote_bytes
        print(json.dumps({**asdict(plan), "file_bytes": size, "parameters": asdict(counts), **more}))
    else:
        drafter = _drafter_lines(plan, drafted)
        print("\n".join([_file_line(model), *_report(plan, resolved, counts, speed, beside, drafter)]))
    check_fits(plan)


def _file_line(model: PlannedModel) -> str:
    if model.remote_bytes is None:
        return f"file         {format_bytes(file_bytes(model.checkpoint))}"
    read = format_bytes(model.read_bytes)
    return f"file         {format_bytes(model.remote_bytes)}, not fetched: {read} of it were read"


def _report(
    plan: MemoryPlan,
    config: ResolvedConfig,
    counts: ParameterCounts,
    speed: FetchSpeed | None,
    beside: Sequence[str],
    drafter: Sequence[str],
) -> list[str]:
    on_gpu = plan.device == "cuda"
    kept = f"{format_bytes(plan.embedding_bytes)}, {'about' if on_gpu else 'which stays in its file'}"
    most = plan.kv_most_bytes or 0
    more = f", up to {format_bytes(most)} with --kv-cache-bytes" if most > plan.kv_limit_bytes else ""
    left = max(0, plan.free_bytes - plan.needed_bytes - plan.reserved_bytes)
    if config.kv_cache_bytes is not None and plan.kv_limit_bytes > left:
        more = f", and {format_bytes(left)} are free beside the weights"
    cache = f"{format_bytes(plan.kv_bytes_per_token)} a token of {plan.kv_dtype}"
    short = "" if plan.needed_bytes <= plan.free_bytes else f": {format_bytes(plan.needed_bytes)} do not fit"
    reserved = ""
    if plan.reserved_bytes:
        sampling = format_bytes(plan.reserved_bytes - plan.graph_bytes)
        reserved = f", {sampling} for sampling and partial sums, {format_bytes(plan.graph_bytes)} for graphs"
    experts = []
    if plan.token_weight_bytes is not None and counts.active != counts.total:
        experts.append(f"parameters   {parameters_text(counts)}, which reads {format_bytes(plan.token_weight_bytes)}")
    lines = [
        f"weights      {format_bytes(plan.weight_bytes)} packed, and the embedding, {kept}",
        *experts,
        *drafter,
        f"workspace    {format_bytes(plan.workspace_bytes)}{reserved}",
        f"KV cache     {cache}, {format_bytes(plan.kv_limit_bytes)} in all{more}",
        *states_lines(plan, config.max_running, speed),
        f"free memory  {format_bytes(plan.free_bytes)}{' for each replica' if beside else ''}{short}",
        *beside,
        "",
        f"{'context':>9}  {'KV cache of one':>15}  requests at once",
    ]
    for each in plan.contexts:
        count = "none" if each.num_requests == 0 else f"{min(each.num_requests, config.max_running)}"
        if each.num_requests > config.max_running:
            count += f" (room for {each.num_requests})"
        lines.append(f"{each.context_length:>9}  {format_bytes(each.request_bytes):>15}  {count}")
    return lines


def _drafter_lines(plan: MemoryPlan, drafted: DraftedModel) -> list[str]:
    """Lines for people: what drafts, or why files beside the model do not."""
    if not drafted.others:
        return [f"drafter      none: {reason}" for reason in drafted.refused]
    is_own = drafted.config.drafter == "auto"
    name = "the model's own next-token block" if is_own else drafted.others["drafter"].checkpoint.path.name
    return [f"drafter      {format_bytes(plan.beside_bytes)} of weights and workspace, {name}"]


def states_lines(plan: MemoryPlan, max_running: int, speed: FetchSpeed | None = None) -> list[str]:
    """The lines of a model whose layers have states; `speed` was measured when the model was last loaded."""
    if not plan.state_bytes:
        return []
    snapshots = f"{plan.num_snapshots} snapshots of {format_bytes(plan.snapshot_bytes)} in the KV cache"
    kept = snapshots if plan.num_snapshots else "no snapshots"
    if plan.num_host_snapshots:
        kept += f", {plan.num_host_snapshots} of {format_bytes(plan.host_snapshot_bytes)} in the host's memory"
    lines = [f"states       {format_bytes(plan.state_bytes)} a row of {max_running}, {kept}"]
    if plan.num_host_snapshots:
        measured = "as measured at the first load" if speed is None else str(speed)
        lines.append(f"{'':13}where that is faster than computing: {measured}")
    return lines


def check_fits(plan: MemoryPlan) -> None:
    """It raises CapacityError if weights and workspace, or the KV cache of the shortest context, do not fit."""
    plan.check_weights_fit()
    shortest = plan.contexts[0]
    if shortest.num_requests == 0:
        raise CapacityError(
            f"the model does not fit: one request of {shortest.context_length} tokens takes"
            f" {format_bytes(shortest.request_bytes)} of KV cache, which gets {format_bytes(plan.kv_limit_bytes)}"
        )


def _least_of(planned: Sequence[PlannedReplica]) -> PlannedReplica:
    """The replica with the least memory, which bounds what a request may take."""
    return min(planned, key=lambda each: each.memory_bytes)


def _replica_facts(planned: PlannedReplica) -> dict[str, object]:
    gpu = planned.place.gpu
    return {
        "device": "cpu" if gpu is None else f"cuda:{gpu.index}",
        "cpus": planned.place.cpus,
        "cores_are_shared": planned.place.is_shared,
        "threads": planned.config.threads,
        "context_length": planned.config.context_length,
        "memory_bytes": planned.memory_bytes,
        "needed_bytes": planned.needed_bytes,
    }


def _replica_lines(checkpoint: Checkpoint, planned: Sequence[PlannedReplica], *, context_given: bool) -> list[str]:
    """Lines for people; `context_given`: the user chose the context."""
    from realizar.models.registry import build_spec

    lines = [f"replica {number:<4} {each.label}" for number, each in enumerate(planned)]
    own, fitting = build_spec(checkpoint).context_length, _least_of(planned).config.context_length
    if fitting is not None and fitting < own and not context_given:
        lines.append(f"context      {fitting} tokens a request, as the model's {own} do not fit")
    return lines

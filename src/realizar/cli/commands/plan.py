"""`realizar plan` shows the memory that a model takes and the requests that fit. It reads only headers of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.commands.inspect import cache_text, file_bytes, parameters_text
from realizar.cli.options.arguments import Integer, Json, MaybeSize, Model, complete_model
from realizar.cli.options.engine import BatchingOptions, DraftOptions, EngineOptions
from realizar.cli.options.loading import PlannedModel, check_for_several, planned_model
from realizar.cli.options.serve import check_replicas
from realizar.cli.terminal.printable import printable
from realizar.errors import CapacityError, InvalidRequestError
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.backends.memory_plan import MemoryPlan
    from realizar.backends.resolved_config import ResolvedConfig
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.config import EngineConfig
    from realizar.engine.draft_models import DraftedModel
    from realizar.engine.fetch_speed import FetchSpeed
    from realizar.engine.planned_cards import PlannedCards
    from realizar.engine.planned_load import PlannedEncoder
    from realizar.models.parameters import ParameterCounts
    from realizar.replicas.planning import PlannedReplica


def plan_command(
    model: Model,
    /,
    *others: Annotated[
        str, Parameter(help="More models, to learn whether all of them fit at once.", completer=complete_model)
    ],
    memory: Annotated[
        MaybeSize,
        Parameter(
            help="Free memory to plan for, such as 32G, here or on each of GPUs that need not be there; default what is"
            " free."
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
    if others:
        check_for_several(config)
        if replicas > 1:
            raise InvalidRequestError("--replicas above 1 serve a single model", "replicas")
    drafter, is_auto = config.draft_model, config.drafter == "auto"
    with ExitStack() as opened:
        found = [
            opened.enter_context(
                planned_model(each, mmproj=config.mmproj, vocabulary=drafter is not None, drafter=is_auto)
            )
            for each in (model, *others)
        ]
        if drafter is not None:
            beside = opened.enter_context(planned_model(drafter, mmproj="none", vocabulary=True))
            config = replace(config, drafter=str(beside.checkpoint.path.absolute()))
        if others:
            _show_several((model, *others), found, config, memory, as_json=as_json)
            return
        plan = _plan(found[0], config, replicas, memory)
        print(json.dumps(plan.record) if as_json else "\n".join(plan.lines))
        check_fits(plan.memory)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A model's plan, for people and as JSON."""

    memory: MemoryPlan
    lines: list[str]
    record: dict[str, object]


def _plan(model: PlannedModel, config: EngineConfig, replicas: int, memory: int | None) -> _Plan:
    from realizar.backends.device_choice import choose_planned_device
    from realizar.backends.select import plan_memory
    from realizar.engine.core.disk_cache import HOST_BYTES
    from realizar.engine.draft_models import resolve_drafted
    from realizar.engine.fetch_speed import known_speed
    from realizar.engine.planned_cards import advise, plan_cards
    from realizar.engine.planned_load import plan_encoder
    from realizar.models.parameters import count_parameters
    from realizar.quantization.tensors import asks_for_fp8, cache_scheme

    if memory is not None and config.layers_on is not None:
        raise InvalidRequestError("--memory is of one device, and --layers-on names several", "memory")
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
    encoder = plan_encoder(checkpoint, resolved)
    speed = known_speed(checkpoint.path, resolved) if plan.num_host_snapshots else None
    counts = count_parameters(spec)
    more["fetch_speed"] = None if speed is None else asdict(speed)
    more |= {"fetched": model.remote_bytes is None, "read_bytes": model.read_bytes}
    more["drafter"] = others["drafter"].checkpoint.path.name if others else None
    more["cache_files_bytes"] = 0 if resolved.cache_dir is None else HOST_BYTES
    more["encoder"] = None if encoder.name is None else asdict(encoder)
    more["cache_scheme"] = scheme = cache_scheme(checkpoint)
    cards: tuple[PlannedCards, ...] = ()
    if resolved.chosen.kind == "cuda" and replicas == 1 and not resolved.spans:
        each = plan.free_bytes // resolved.tensor_parallel
        cards = plan_cards(checkpoint, config, resolved.chosen, each)
    more["gpus"] = list(map(asdict, cards))
    more["advice"] = advice = advise(cards, resolved.tensor_parallel) if cards else None
    more["prompt_dtype"] = resolved.prompt_dtype
    size = file_bytes(checkpoint) if model.remote_bytes is None else model.remote_bytes
    record = {**asdict(plan), "file_bytes": size, "parameters": asdict(counts), **more}
    helpers = [*_drafter_lines(plan, drafted), *_encoder_lines(encoder, plan)]
    if resolved.cache_dir is not None:
        helpers.append(f"cache files  up to {format_bytes(HOST_BYTES)} of the host's memory, to read and write them")
    if scheme is not None:
        helpers.append(f"keys, values {cache_text(scheme, resolved.kv_dtype)}")
    if resolved.prompt_dtype != "fp8" and asks_for_fp8(checkpoint):
        needed = "a GPU of compute capability 9.0 without --batch-invariant"
        helpers.append(f"activations  not in FP8, as the file asks for: weights alone are, and both on {needed}")
    if advice is not None:
        helpers.append(f"advice       {advice}")
    lines = _report(plan, resolved, counts, speed, beside, helpers)
    return _Plan(plan, [_file_line(model), *lines, *_card_lines(cards, resolved)], record)


def _encoder_lines(encoder: PlannedEncoder, plan: MemoryPlan) -> list[str]:
    if encoder.name is None:
        return [] if encoder.reason is None else [f"encoder      none: {encoder.reason}"]
    size, kept = f"{format_bytes(encoder.weight_bytes)} of weights", format_bytes(encoder.kept_bytes)
    work = f"up to {format_bytes(encoder.workspace_bytes)} to work in"
    of_host = " of the host's memory" if plan.device == "cuda" else ""
    if encoder.device == "cuda":
        said = f"{size} and {work}, and{of_host} up to {kept} for embeddings"
    else:
        said = f"{size}, {work} and {kept} for embeddings{of_host}, once an image comes"
    return [f"encoder      {said}: {encoder.name} of {encoder.file}"]


def _show_several(
    names: Sequence[str], models: Sequence[PlannedModel], config: EngineConfig, memory: int | None, *, as_json: bool
) -> None:
    """Show each model's plan, and whether a server could keep all of them loaded."""
    plans = [_plan(model, config, 1, memory) for model in models]
    if not as_json:
        for name, plan in zip(names, plans, strict=True):
            print("\n".join([f"model        {printable(name)}", *plan.lines, ""]))
    pools: dict[str, _Pool] = {}
    failure = None
    for name, model, plan in zip(names, models, plans, strict=True):
        try:
            _take(pools, model, plan, config, memory)
        except CapacityError as error:
            failure = CapacityError(f"{name}: {error}")
            break
    if as_json:
        records = [{"name": name, **plan.record} for name, plan in zip(names, plans, strict=True)]
        together = [] if failure else [{"device": device, **asdict(pool)} for device, pool in pools.items()]
        print(json.dumps({"models": records, "together": together}))
    if failure is not None:
        raise failure
    for device, pool in () if as_json else pools.items():
        fit = "all fit at once" if pool.fits else "they do not fit at once, and a server loads them in turn"
        print(f"together     {format_bytes(pool.needed_bytes)} of {format_bytes(pool.memory_bytes)} on {device}: {fit}")


@dataclass(slots=True)
class _Pool:
    """What models take of a device together, and what they may take."""

    needed_bytes: int
    memory_bytes: int
    fits: bool = True


def _take(pools: dict[str, _Pool], model: PlannedModel, plan: _Plan, config: EngineConfig, memory: int | None) -> None:
    """Add what a server plans for a model to its device's pool. CapacityError: it does not fit alone."""
    from realizar.backends.device_choice import choose_planned_device
    from realizar.engine.planned_load import plan_within

    check_fits(plan.memory)
    chosen = choose_planned_device(config.device, memory_given=memory is not None)
    load, most = plan_within(model.checkpoint, config, memory, chosen)
    pool = pools.setdefault(load.device, _Pool(0, most))
    pool.needed_bytes += load.num_bytes
    pool.memory_bytes = min(pool.memory_bytes, most)
    pool.fits = pool.needed_bytes <= pool.memory_bytes


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
    helpers: Sequence[str],
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
    of_several = " for each replica" if beside else ""
    if on_gpu and config.tensor_parallel > 1:
        of_several = f" on {config.tensor_parallel} GPUs{of_several}, and all figures are of all of them"
    reserved = ""
    if plan.reserved_bytes:
        sampling = format_bytes(plan.reserved_bytes - plan.graph_bytes)
        reserved = f", {sampling} for sampling and partial sums, {format_bytes(plan.graph_bytes)} for graphs"
    experts = []
    if plan.token_weight_bytes is not None and counts.active != counts.total:
        experts.append(f"parameters   {parameters_text(counts)}, which reads {format_bytes(plan.token_weight_bytes)}")
    if config.spans:
        of_several = " on all devices"
    where = "" if config.chosen.name else ", on a card of compute capability 9.0"
    lines = [
        f"weights      {format_bytes(plan.weight_bytes)} packed, and the embedding, {kept}",
        *experts,
        *helpers,
        f"workspace    {format_bytes(plan.workspace_bytes)}{reserved}",
        f"KV cache     {cache}, {format_bytes(plan.kv_limit_bytes)} in all{more}",
        *([f"prompts      multiplied in FP8, weights and activations{where}"] if config.prompt_dtype == "fp8" else []),
        *states_lines(plan, config.max_running, speed),
        f"free memory  {format_bytes(plan.free_bytes)}{of_several}{short}",
        *_span_lines(plan, config),
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


def _card_lines(cards: Sequence[PlannedCards], config: ResolvedConfig) -> list[str]:
    """A table of what so many GPUs have room for, and of the tokens/s of their steps."""
    from realizar.engine.planned_cards import PROMPT_TOKENS, TEXT_TOKENS, TEXTS

    if not cards:
        return []
    lines = ["", "GPUs that compute the model together"]
    if any(each.one_text is not None for each in cards):
        length = config.context_length
        texts, prompt = min(TEXT_TOKENS, length), min(PROMPT_TOKENS, length, config.max_step_tokens)
        lines[1] += ", tokens/s reckoned by rates of an H200, and not measured:"
        lines.append(f"of texts after {texts} tokens, and of a prompt of {prompt}")
    lines.append(
        f"{'GPUs':>9}  {'longest context':>15}  {'at once':>7}  {'one text':>8}  {f'{TEXTS} texts':>8}  {'prompt':>8}"
    )
    for each in cards:
        rates = [f"{'-' if rate is None else f'{rate:,.0f}':>8}" for rate in (each.one_text, each.texts, each.prompt)]
        fits = f"{each.context_length:>15}  {each.num_requests:>7}  {'  '.join(rates)}"
        lines.append(f"{each.gpus:>9}  {fits if each.fits else each.reason or 'does not fit'}")
    return lines


def _span_lines(plan: MemoryPlan, config: ResolvedConfig) -> list[str]:
    """What each device takes, where several have layers."""
    return [
        f"{span.config.chosen.place:<12} layers {span.first} to {span.stop - 1}: {format_bytes(each.needed_bytes)} of"
        f" weights and workspace, {format_bytes(each.kv_limit_bytes)} of KV cache, {format_bytes(each.free_bytes)} free"
        for span, each in zip(config.spans, plan.of_spans, strict=True)
    ]


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
    return {
        "device": ", ".join(planned.place.devices) or "cpu",
        "processes": planned.config.tensor_parallel,
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

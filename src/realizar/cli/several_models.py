"""`make_shelf` finds and plans the models of a server that has several, before it starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from realizar.cli.options.loading import fetch_model
from realizar.cli.options.several_models import SeveralModelsOptions
from realizar.cli.terminal.printable import report
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import SamplingParams
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.checkpoint.checkpoint import Checkpoint
    from realizar.checkpoint.model_files import ModelFiles
    from realizar.engine.process.planning import PlanAnswer
    from realizar.server.models.shelf import ModelShelf
    from realizar.server.models.shelved import KnownModel
    from realizar.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options of the command line that hold for all models.

    `sampling` gives the default sampling of a model from its checkpoint.
    """

    config: EngineConfig
    sampling: Callable[[Checkpoint], SamplingParams]
    max_queued: int | None
    log_level: str


@dataclass(frozen=True, slots=True)
class _Found:
    """A model whose files can be opened.

    `named`: it was named, and not found in a folder. `by_client`: it was pulled, maybe for a client.
    """

    name: str
    checkpoint: Checkpoint
    named: bool
    by_client: bool = False


def make_shelf(
    models: Sequence[str], options: SeveralModelsOptions, wishes: Wishes, settings: ServerSettings
) -> ModelShelf:
    """Make the models of a server. A model of a folder that can't be served is left out with a warning.

    It raises RealizarError if a model that was named can't be served, or none is left.
    """
    from realizar.backends.machine import read_machine
    from realizar.checkpoint.model_files import ModelFiles
    from realizar.engine.process.planning import plan_loads
    from realizar.server.models.lives import EngineLoader
    from realizar.server.models.pulls import Pulls, fetch_in_process
    from realizar.server.models.shelf import ModelShelf

    found = _find(models, options, wishes.config.mmproj)
    config = replace(wishes.config, max_queued=wishes.max_queued)
    answers = plan_loads([str(each.checkpoint.path) for each in found], config, options.memory)
    known: list[KnownModel] = []
    files: dict[str, ModelFiles] = {}
    pools: dict[str, int] = {}
    for each, answer in zip(found, answers, strict=True):
        try:
            model = _known(each, answer, wishes)
        except RealizarError as error:
            if each.named:
                raise RealizarError(f"{each.name}: {error}") from error
            report(f"warning: {each.name} is left out: {error}")
            continue
        known.append(model)
        files[each.name] = ModelFiles(each.checkpoint)
        pools[model.load.device] = min(pools.get(model.load.device, answer.memory_bytes), answer.memory_bytes)
    if not known and not options.allow_pull:
        raise RealizarError(f"{options.model_folder} has no model that can be served")
    free = read_machine().available_bytes
    host_bytes = _sleep_bytes(options, known, free)
    sharers = _sharers(known, host_bytes, free)
    known = [_sharing(_sleeping(model, host_bytes), sharers) for model in known]
    if any(model.load.host_bytes for model in known):
        report(f"models that make room wait in up to {format_bytes(host_bytes)} of the host's memory")
    for model in known:
        size, pool = format_bytes(model.load.num_bytes), format_bytes(pools[model.load.device])
        report(f"{model.name}: {size} of {pool}, context {model.load.context_length}")
    loader = EngineLoader(files, settings, wishes.log_level, wishes.max_queued)
    shelf = ModelShelf(known, loader.load, pools, options.keep_alive, host_bytes)
    if options.allow_pull:
        fetch = partial(fetch_in_process, mmproj=config.mmproj)
        shelf.pulls = Pulls(fetch, partial(_add, shelf, files, wishes, config, options.memory))
    return shelf


async def _add(
    shelf: ModelShelf,
    files: dict[str, ModelFiles],
    wishes: Wishes,
    config: EngineConfig,
    memory_bytes: int | None,
    name: str,
    path: Path,
) -> None:
    """Have a shelf serve a model that was pulled. It raises RealizarError if the model can't be served."""
    from realizar.checkpoint.model_files import ModelFiles
    from realizar.engine.loading import find_checkpoint
    from realizar.engine.process.planning import plan_loads

    def plan() -> tuple[KnownModel, ModelFiles, int]:
        checkpoint = find_checkpoint(str(path))
        memory = dict(shelf.bytes_of_pools) if memory_bytes is None else memory_bytes
        (answer,) = plan_loads([str(checkpoint.path)], config, memory)
        known = _known(_Found(name, checkpoint, named=False, by_client=True), answer, wishes)
        return known, ModelFiles(checkpoint), answer.memory_bytes

    known, files[name], bytes_of_pool = await asyncio.to_thread(plan)
    shelf.add(_sharing(_sleeping(known, shelf.host_bytes), 0), bytes_of_pool)
    report(f"{name}: pulled for a client, {format_bytes(known.load.num_bytes)}")


def _sleep_bytes(options: SeveralModelsOptions, models: Sequence[KnownModel], free_bytes: int) -> int:
    """Memory of the host, which has `free_bytes`, in which models may sleep.

    It raises InvalidRequestError if some is wanted, and no model is on a GPU, nor will be.
    """
    if not options.allow_pull and not any(model.load.host_bytes for model in models):
        if options.sleep_memory:
            raise InvalidRequestError(
                "--sleep-memory is for models on a GPU: on the CPU their weights are in the host's memory",
                "sleep_memory",
            )
        return 0
    return free_bytes // 2 if options.sleep_memory is None else options.sleep_memory


def _sharers(models: Sequence[KnownModel], sleep_bytes: int, free_bytes: int) -> int:
    """Models that share what engines take of the host for snapshots of states by default: an eighth of what is free.

    None share it where sleeping models may take so much that it is not left.
    """
    from realizar.backends.kv_blocks import HOST_SHARE

    if sleep_bytes > free_bytes - free_bytes // HOST_SHARE:
        return 0
    return sum(model.load.host_bytes > 0 for model in models)


def _sharing(model: KnownModel, sharers: int) -> KnownModel:
    """A model whose engine knows how many share the host; 0 leaves it nothing by default."""
    config = model.load.config
    if config.host_snapshot_bytes is not None or model.load.device == "cpu":
        return model
    config = replace(config, host_sharers=sharers) if sharers else replace(config, host_snapshot_bytes=0)
    return replace(model, load=msgspec.structs.replace(model.load, config=config))


def _sleeping(model: KnownModel, host_bytes: int) -> KnownModel:
    """A model that never sleeps where the host has no room for it, or the GPU would get nothing back."""
    if model.load.host_bytes <= host_bytes and model.load.asleep_bytes < model.load.num_bytes:
        return model
    return replace(model, load=msgspec.structs.replace(model.load, host_bytes=0, asleep_bytes=0))


def _find(models: Sequence[str], options: SeveralModelsOptions, mmproj: str) -> list[_Found]:
    from realizar.server.models.names import default_name

    found: dict[str, _Found] = {}
    listed = [(default_name(model), model, True) for model in models]
    for path in map(str, options.in_folder()):
        try:
            listed.append((default_name(path), path, False))
        except InvalidRequestError as error:
            report(f"warning: a model is left out: {error}")
    taken = {name for name, _, _ in listed}
    pulled = {name: path for name, path in _pulled_before(options) if name not in taken}
    listed += [(name, path, False) for name, path in pulled.items()]
    for name, model, named in listed:
        if name in found:
            raise InvalidRequestError(f"two models have the name {name}; give one file or folder another", "model")
        try:
            found[name] = _Found(name, fetch_model(model, mmproj=mmproj), named, name in pulled)
        except RealizarError as error:
            if named:
                raise
            report(f"warning: {name} is left out: {error}")
    return list(found.values())


def _pulled_before(options: SeveralModelsOptions) -> list[tuple[str, str]]:
    """Names and paths of the models that clients could pull without fetching anything."""
    if not options.allow_pull:
        return []
    from realizar.hub.pull import list_models

    return [(model.name, str(model.path)) for model in list_models() if model.path is not None]


def _known(found: _Found, answer: PlanAnswer, wishes: Wishes) -> KnownModel:
    from realizar.server.model_facts import read_facts
    from realizar.server.models.shelved import KnownModel
    from realizar.server.request_templates import compile_apart

    return KnownModel(
        found.name,
        str(found.checkpoint.path),
        answer.checked(),
        wishes.sampling(found.checkpoint),
        read_facts(found.checkpoint, compiler=compile_apart if found.by_client else None, config=wishes.config),
        int(time.time()),
        found.by_client,
    )

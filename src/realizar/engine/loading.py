"""Loading opens a model by its name and makes an engine that runs it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from realizar import backends
from realizar.backends.base import Backend, FetchesSnapshots, OtherModels, SavesCache
from realizar.backends.devices import ChosenDevice
from realizar.backends.load_progress import LoadProgress
from realizar.backends.machine import num_processors
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import (
    free_room,
    make_backend,
    make_span_backend,
    make_tower,
    make_tower_on_gpu,
    plan_load,
    refusal,
    resolve_model,
    tower_on_gpu,
)
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.pictures import Encode, PictureEncoder, Slices
from realizar.engine.draft_models import resolve_drafted
from realizar.engine.fetch_speed import FetchSpeed, keep_speed
from realizar.engine.planned_load import SHORTEST_CONTEXT, longest_fitting
from realizar.errors import CapacityError, CaptureLostError, DeviceLostError, KernelError, StepError
from realizar.hub.progress import Progress, ignore_progress
from realizar.hub.pull import resolve
from realizar.images.prepare import patches_of
from realizar.kv_cache.block_files import BlockFiles, sampled_digest
from realizar.models.spec import ModelSpec
from realizar.models.tower import Tower
from realizar.models.towers.find import usable_tower
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafts import Drafter
from realizar.scheduler.pace import Policy
from realizar.sizes import format_bytes
from realizar.structured.grammar_tokens import EncodeSource, GrammarTokens
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerLimits
from realizar.tokenizer.load import load_tokenizer, plain_encoder
from realizar.tokenizer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_MOST_GRAMMAR_WORKERS = 14  # that rows share, of the processors but two
_MOST_MEASURED_TOKENS = 2048  # of the prompt by which fetching is measured


def find_checkpoint(model: str | Path, progress: Progress = ignore_progress, *, mmproj: str = "auto") -> Checkpoint:
    """Open a model by path, pulled name or Hugging Face name; `progress` is a callback for downloads.

    An encoder of images that lies beside it is fetched with it where `mmproj`, of `EngineConfig`, is `auto`. It raises
    HubError if the model can't be found or fetched, and CheckpointError if the file is malformed.
    """
    return open_checkpoint(resolve(str(model), progress, free_room, towers=mmproj == "auto"))


def load_core(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    policy: Policy | None = None,
    progress: LoadProgress | None = None,
    tokenizer: Tokenizer | None = None,
    may_sleep: bool = False,
    may_restart: bool = False,
    drafter: Drafter | None = None,
) -> EngineCore:
    """Load a checkpoint's weights into a backend and make an engine for it. Only grammars need the vocabulary.

    Where the device is `auto` and the kernels of a GPU fail, the CPU runs the model; a warning says so.

    Args:
        tokenizer: the model's; None reads it from the checkpoint for the first grammar.
        progress: callback with the name of the running stage and the share that is done, 0 to 1.
        may_sleep: True to load it so that `EngineCore.sleep` can give a GPU's memory back.
        may_restart: True where another process, without graphs, follows one whose device is lost while they are
            captured: the CPU then does not take its place. Most graphs are left to `EngineCore.prepare` there, and the
            vocabulary is read meanwhile.
        drafter: as of `EngineCore`.

    Raises:
        UnsupportedModelError: the model can't run here.
        CheckpointError: a tensor is missing, unknown or of the wrong shape.
        CapacityError: the model does not fit into memory.
        InvalidRequestError: `cache_dir` can't be used.
        KernelError, DeviceLostError: the GPU's kernels fail or compute something else than the CPU, and nothing takes
            their place.
    """
    vocabulary = _begin_reading(checkpoint) if tokenizer is None and may_restart else None
    backend, spec, resolved, others, slices = _load_backend(
        checkpoint, config, progress, may_sleep=may_sleep, may_restart=may_restart
    )
    try:
        new_grammars = partial(_new_grammars, checkpoint, spec.vocab_size, vocabulary or tokenizer, resolved)
        opened, pictures = [checkpoint, *(each.checkpoint for each in others.values())], None
        tower, _ = usable_tower(checkpoint, config.mmproj)
        if tower is not None:
            opened.append(tower[0])
            pictures = _new_encoder(*tower, config.threads, slices)
        files = _open_files(opened, spec, resolved, backend, encodes_on_gpu=slices is not None)
        core = EngineCore(
            backend, spec, resolved, policy=policy, new_grammars=new_grammars, drafter=drafter, files=files,
            pictures=pictures,
        )  # fmt: skip
        speed = measure_fetching(core, backend)
        if speed is not None:
            keep_speed(checkpoint.path, resolved, speed)
        return core
    except BaseException:
        if slices is not None:
            slices.close()
        backend.shutdown()
        raise


def _load_backend(
    checkpoint: Checkpoint, config: EngineConfig, progress: LoadProgress | None, *, may_sleep: bool, may_restart: bool
) -> tuple[Backend, ModelSpec, ResolvedConfig, OtherModels, Slices | None]:
    spec, resolved, others, refused = resolve_drafted(checkpoint, config)
    for reason in refused:
        _LOG.warning("%s", reason)
    backend, slices = None, None
    compared_for = (spec, checkpoint) if config.device_check else None
    try:
        if resolved.spans:
            backend = make_span_backend(resolved, progress)
        else:
            backend = make_backend(
                resolved.chosen, progress, may_sleep=may_sleep, compared_for=compared_for,
                ranks=resolved.tensor_parallel, defers=may_restart,
            )  # fmt: skip
        refusing = partial(_LOG.warning, "images are encoded on the CPU: %s")
        tower = None if may_sleep else tower_on_gpu(checkpoint, resolved, refusing)
        if tower is not None:  # before the KV cache takes what is left
            slices = _slices_on_gpu(tower[1], tower[0], resolved.chosen)
        backend.load(spec, checkpoint, resolved, others)
        return backend, spec, resolved, others, slices
    except BaseException as error:
        if slices is not None:
            slices.close()
        if backend is not None:
            backend.shutdown()
        failed = isinstance(error, KernelError | DeviceLostError)
        has_other = config.device == "auto" and not resolved.spans and resolved.chosen.kind != "cpu"
        if not has_other or not failed or refusal(spec, "cpu") is not None:
            raise
        if may_restart and config.graphs and isinstance(error, CaptureLostError):
            raise
        _LOG.warning("the model runs on the CPU, as its kernels fail on %s: %s", resolved.chosen.label, error)
    return _load_backend(checkpoint, replace(config, device="cpu"), progress, may_sleep=False, may_restart=False)


def _slices_on_gpu(tower: Tower, checkpoint: Checkpoint, chosen: ChosenDevice) -> Slices | None:
    """None where its kernels fail: the text model may run there none the less."""
    try:
        encoder = make_tower_on_gpu(tower, checkpoint, chosen)
    except (KernelError, StepError) as error:
        _LOG.warning("images are encoded on the CPU, as their encoder's kernels fail on %s: %s", chosen.label, error)
        return None
    _LOG.info("loaded the encoder of images on the GPU, %s", format_bytes(encoder.size_bytes))
    return Slices(encoder)


def _new_encoder(checkpoint: Checkpoint, tower: Tower, threads: int | None, slices: Slices | None) -> PictureEncoder:
    """By the GPU where there are slices, and else by the CPU, from the first picture on."""
    if slices is not None:
        return PictureEncoder(lambda: slices.encode, slices)
    return PictureEncoder(partial(_load_encoder, checkpoint, tower, threads))


def _load_encoder(checkpoint: Checkpoint, tower: Tower, threads: int | None) -> Encode:
    """Load an encoder of images on the CPU. Raises as `make_tower`."""
    encoder = make_tower(tower, checkpoint, threads)
    _LOG.info("loaded the encoder of images, %s", format_bytes(encoder.size_bytes))
    return lambda picture: encoder.encode(patches_of(tower, picture))


def _open_files(
    checkpoints: Iterable[Checkpoint],
    spec: ModelSpec,
    config: ResolvedConfig,
    backend: Backend,
    *,
    encodes_on_gpu: bool,
) -> BlockFiles | None:
    """The files of the prefix cache of a loaded model, what drafts for it and what encodes its images; None where none
    are kept.
    """
    if config.cache_dir is None or not isinstance(backend, SavesCache):
        return None
    paths = {tensor.path for each in checkpoints for tensor in each.tensors.values()}
    paths |= {path for each in checkpoints for path in each.path.glob("*.json")}  # of a folder
    ropes = {repr(attention.rope) for _, attention in spec.attentions()}  # may depend on the context's length
    facts = (
        _backends_digest(), config.chosen.kind, backend.layout, backend.part_bytes, config.kv_dtype,
        config.block_size, config.batch_invariant, config.prompt_dtype, config.expert_used_count, config.most_drafts,
        encodes_on_gpu, sorted(ropes), *(sampled_digest(path) for path in sorted(paths)),
    )  # fmt: skip
    files = BlockFiles(
        Path(config.cache_dir), hashlib.sha256(repr(facts).encode()).hexdigest()[:32], config.cache_dir_bytes
    )
    _LOG.info("the prefix cache is kept in %s", files)
    return files


def _backends_digest() -> bytes:
    """Of all that computes: other kernels may round otherwise."""
    digest = hashlib.sha256()
    for path in sorted(Path(backends.__file__).parent.rglob("*")):
        if path.suffix in (".py", ".cu", ".json"):
            digest.update(path.read_bytes())
    return digest.digest()


def _begin_reading(checkpoint: Checkpoint) -> Future[Tokenizer]:
    """Read the vocabulary beside a load, which mostly waits for others; what fails is raised where it is wanted."""
    reader = ThreadPoolExecutor(1, "realizar-vocabulary")
    vocabulary = reader.submit(load_tokenizer, checkpoint)
    reader.shutdown(wait=False)
    return vocabulary


def _new_grammars(
    checkpoint: Checkpoint, vocab_size: int, given: Tokenizer | Future[Tokenizer] | None, resolved: ResolvedConfig
) -> GrammarService:
    tokenizer = given.result() if isinstance(given, Future) else given or load_tokenizer(checkpoint)
    source = EncodeSource(plain_encoder.__module__, plain_encoder.__name__, str(checkpoint.path.absolute()))
    words, special_ids = tokenizer.vocabulary_bytes(), tokenizer.special_ids.union(tokenizer.answer_marks.values())
    tokens = GrammarTokens(words, special_ids, tokenizer.eos_ids, vocab_size, source)
    workers = min(max(num_processors() - 2, 1), _MOST_GRAMMAR_WORKERS)
    limits = WorkerLimits(slots=2 * resolved.max_running, drafts=resolved.speculative_tokens, workers=workers)
    return GrammarService(tokens, limits=limits)


def load_fitting_core(
    checkpoint: Checkpoint, config: EngineConfig, *, progress: LoadProgress | None = None, may_restart: bool = False
) -> EngineCore:
    """Load with the model's own context, or the largest half, quarter and so on of it that fits into memory.

    Where the planned context does not fit, as other programs may take memory meanwhile, half of it is tried once. It
    raises what `load_core` does; CapacityError where not even the shortest context worth having fits.
    """
    length = fitting_context(checkpoint, config)
    try:
        return load_core(checkpoint, replace(config, context_length=length), progress=progress, may_restart=may_restart)
    except CapacityError as error:
        if length // 2 < SHORTEST_CONTEXT:
            raise
        reason = str(error)  # the error itself would keep what was loaded
    _LOG.warning("the planned context of %d tokens does not fit; %d tokens are tried: %s", length, length // 2, reason)
    shorter = replace(config, context_length=length // 2)
    return load_core(checkpoint, shorter, progress=progress, may_restart=may_restart)


def fitting_context(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """The model's own context, or the largest half, quarter and so on that fits, planned from the header alone.

    It raises CapacityError if not even the shortest context worth having fits, beside what is free now.
    """
    _, whole, others, _ = resolve_drafted(checkpoint, replace(config, context_length=None))
    config = replace(config, drafter=whole.drafter)

    def checked(length: int) -> int:
        spec, resolved = resolve_model(checkpoint, replace(config, context_length=length), whole.chosen)
        plan_load(spec, checkpoint, resolved, others).check_one_fits()
        return length

    return longest_fitting(whole.context_length, checked)


def measure_fetching(core: EngineCore, backend: Backend) -> FetchSpeed | None:
    """Measure a backend that nobody uses yet, and have its engine decide by that; None if it has no host snapshots.

    The prompts are read by another engine, so that none of them is in this one's figures.
    """
    if not isinstance(backend, FetchesSnapshots) or not core.spec.state_layers():
        return None
    if not core.capacity.num_host_snapshots:
        _warn_of_cache(core, backend.snapshot_bytes)
        _warn_of_host(core, backend.snapshot_bytes)
        return None
    count = min(_MOST_MEASURED_TOKENS, core.config.max_step_tokens, core.scheduler.max_request_tokens - 1)
    prompt = tuple(place * 7919 % core.spec.vocab_size for place in range(count))
    reader = EngineCore(backend, core.spec, core.config)
    seconds = min(_read(reader, prompt, salt) for salt in ("first", "second"))  # the first may compile
    found = FetchSpeed(backend.time_fetch(), backend.snapshot_bytes, count / seconds)
    core.cache.least_fetched_tokens = found.least_tokens
    on_host = core.capacity.num_host_snapshots
    size = format_bytes(on_host * backend.snapshot_bytes)
    _LOG.info("up to %d snapshots of states wait in %s of the host's memory, %s", on_host, size, found)
    return found


def _warn_of_cache(core: EngineCore, snapshot_bytes: int) -> None:
    """Say why no prompt starts from an earlier one's beginning, where that was not turned off."""
    if core.config.prefix_cache and not core.capacity.num_snapshots:
        _LOG.warning(
            "prefixes are not cached: a snapshot of the model's states takes %s, and the KV cache has no room for one"
            " beside a request of %d tokens; raise kv_cache_bytes or lower the context length",
            format_bytes(snapshot_bytes),
            core.config.context_length,
        )


def _warn_of_host(core: EngineCore, snapshot_bytes: int) -> None:
    """Say why no snapshot waits in the host's memory, where that was asked for."""
    given = core.config.host_snapshot_bytes
    if not given:
        return
    why = "the cache has none to store"
    if core.capacity.num_snapshots:
        why = f"one takes {format_bytes(snapshot_bytes)}, and host_snapshot_bytes is {format_bytes(given)}"
    _LOG.warning("no snapshot of a state waits in the host's memory: %s", why)


def _read(core: EngineCore, prompt: tuple[int, ...], salt: str) -> float:
    started_s = time.perf_counter()
    core.add(Request(f"measure-{salt}", prompt, SamplingParams(temperature=0.0), 1, cache_salt=f"measure-{salt}"))
    while core.has_work:
        core.step()
    return time.perf_counter() - started_s

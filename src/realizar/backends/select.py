"""Choice of the backend that runs a model. Standard library until one is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from realizar.backends.base import NO_OTHERS, Backend, OtherModels
from realizar.backends.device_choice import begin_context, choose_device, may_be_gpu
from realizar.backends.devices import THE_CPU, TRAITS, ChosenDevice
from realizar.backends.draft_model import shared_with
from realizar.backends.inspection import InspectedBackend
from realizar.backends.load_progress import LoadProgress, no_progress
from realizar.backends.machine import default_threads, free_memory_bytes
from realizar.backends.memory_plan import MemoryPlan, plan_of_spans
from realizar.backends.resolved_config import LayerSpan, ResolvedConfig, resolve_config
from realizar.backends.spans.resolve import resolve_spans
from realizar.backends.supported import Supported, find_drafter
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.errors import UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.cut_layers import cut_layers
from realizar.models.registry import build_next_token_block, build_spec
from realizar.models.spec import ModelSpec
from realizar.models.tower import Tower
from realizar.models.towers.find import usable_tower
from realizar.quantization.tensors import asks_for_fp8, stored_names

if TYPE_CHECKING:
    from realizar.backends.cpu.runner import CPUBackend
    from realizar.backends.cpu.tower import CPUTower
    from realizar.backends.cuda.device import DeviceProfile
    from realizar.backends.cuda.runner import CUDABackend
    from realizar.backends.cuda.tower import CUDATower
    from realizar.backends.rank_memory import RankPlace

_LOG = logging.getLogger(__name__)
_BESIDE_BYTES = 8 << 30
"""Of a GPU beside the weights, for a process that compares it: its context, small models, and what the load takes."""


def resolve_model(
    checkpoint: Checkpoint, config: EngineConfig, device: ChosenDevice | None = None, memory_bytes: int | None = None
) -> tuple[ModelSpec, ResolvedConfig]:
    """The description of a checkpoint's model, and a configuration in which nothing is left open.

    A device of `auto` is the CPU for a model that runs on no GPU. On a GPU each row of a model with states takes memory
    from the start, so that there are fewer of them by default where that is short. A drafter of `auto` stays where the
    checkpoint has a next-token block that runs on the device, and else is `lookup`.

    Args:
        device: None takes that of `config`.
        memory_bytes: of a GPU, for the model; None is what is free now.

    Raises:
        UnsupportedModelError, CheckpointError, InvalidRequestError, CapacityError: as of `build_spec`, `check_tensors`
            and `choose_device`.
    """
    spec = build_spec(checkpoint, config.context_length, config.expert_used_count)
    if config.layers_on is not None:
        check_tensors(spec, checkpoint)

        def resolve(span: ModelSpec, own: EngineConfig, chosen: ChosenDevice) -> ResolvedConfig:
            return _resolved(checkpoint, span, own, chosen, stored_bytes=_stored_bytes(span, checkpoint))

        return spec, resolve_spans(spec, config, resolve)
    chosen = choose_device(config.device) if device is None else device
    if config.device == "auto":
        chosen = _device_for(spec, chosen)
    check_tensors(spec, checkpoint)
    if config.drafter == "auto" and not _drafts_itself(checkpoint, config, chosen):
        config = replace(config, drafter="lookup")
    return spec, _resolved(checkpoint, spec, config, chosen, memory_bytes)


def _resolved(
    checkpoint: Checkpoint, spec: ModelSpec, config: EngineConfig, chosen: ChosenDevice,
    memory_bytes: int | None = None, stored_bytes: int | None = None,
) -> ResolvedConfig:  # fmt: skip
    """The configuration of a model, or of some of its layers with `stored_bytes`, on a device."""
    if chosen.kind == "cuda" and spec.state_layers() and config.tensor_parallel == 1:
        from realizar.backends.cuda.device import has_memory_of_host
        from realizar.backends.cuda.recurrences.memory import rows_within

        if config.max_running is None:
            memory = _free_on_gpu(chosen) if memory_bytes is None else memory_bytes
            stored = checkpoint.size_bytes if stored_bytes is None else stored_bytes
            config = replace(config, max_running=rows_within(spec, config, memory - stored))
        if config.host_snapshot_bytes is None and has_memory_of_host(chosen.index):
            config = replace(config, host_snapshot_bytes=0)  # nothing is gained by moving them, and the cache takes it
    float32_weights = WeightTensors(spec, checkpoint).are_float32(spec.matrices())
    in_fp8 = asks_for_fp8(checkpoint)
    resolved = resolve_config(spec, config, chosen, float32_weights=float32_weights, fp8_activations=in_fp8)
    if resolved.prompt_dtype == "fp8" and chosen.name and not _multiplies_in_fp8(spec, checkpoint, resolved):
        resolved = replace(resolved, prompt_dtype="f16")
    return resolved


def _stored_bytes(spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """Of the tensors that some layers of a model read."""
    read = {name for source in spec.tensors.values() for name in source.names}
    stored = {each for name in read for each in stored_names(checkpoint, name)}
    return sum(checkpoint.tensors[name].size_bytes for name in stored)


def _multiplies_in_fp8(spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig) -> bool:
    """True if the chosen card does, as far as it was compared with the CPU: a load may find kernels wrong that it is
    the first to compare.
    """
    from realizar.backends.cuda.device import open_device
    from realizar.backends.cuda.matmul.fp8 import runs_fp8

    opened = open_device(config.chosen.index)
    if config.device_check:
        from realizar.backends.verdict.apply import known_faults
        from realizar.backends.verdict.small_models import small_models_like

        opened = replace(opened, without=known_faults(opened, small_models_like(spec, checkpoint)))
    return runs_fp8(opened)


def make_backend(
    device: ChosenDevice, progress: LoadProgress | None = None, *, may_sleep: bool = False,
    compared_for: tuple[ModelSpec, Checkpoint] | None = None, ranks: int = 1, defers: bool = False,
) -> Backend:  # fmt: skip
    """A backend, not loaded yet; compilers are imported here and not before.

    Args:
        progress: called with what loading does, and the share done, 0 to 1.
        may_sleep: the backend is to be a `Sleeps`; only a GPU has memory of its own to give back.
        compared_for: a model with whose kinds of layers a GPU must compute what the CPU does: it is compared where no
            verdict is kept, and goes without the kernels that it gets wrong. None trusts the GPU.
        ranks: processes that compute the model together.
        defers: what is not needed for the first requests is left to a `PreparesLater`, where the backend is one.

    Raises:
        CapacityError: the GPU can't be opened.
        UnsupportedModelError: the CPU is to sleep, or a model that ranks compute.
        KernelError, DeviceLostError: as of `verdict.apply.trusted`.
    """
    if may_sleep and ranks > 1:
        raise UnsupportedModelError(f"a model that {ranks} processes compute together can't sleep")
    if may_sleep and device.kind != "cuda":
        raise UnsupportedModelError("a model on the CPU can't sleep: its weights are in the host's memory already")
    if ranks == 1:
        return _make_alone(device, progress, compared_for, may_sleep=may_sleep, defers=defers)
    from realizar.backends.ranks.backend import RankedBackend

    if device.kind == "cuda":
        from realizar.backends.cuda.plan import rank_config as config_on_gpu

        opened = _open_gpu(device, progress, compared_for)
        return RankedBackend(ranks, config_on_gpu, partial(_make_gpu_rank, opened=opened, progress=progress))
    from realizar.backends.cpu.plan import rank_config

    return RankedBackend(ranks, rank_config, partial(_make_cpu_rank, progress=progress))


def _make_alone(
    device: ChosenDevice, progress: LoadProgress | None, compared_for: tuple[ModelSpec, Checkpoint] | None, *,
    may_sleep: bool = False, defers: bool = False,
) -> CPUBackend | CUDABackend:  # fmt: skip
    """Of a model, or of some of its layers, that one device computes in this process."""
    if device.kind == "cuda":
        from realizar.backends.cuda.runner import CUDABackend

        if not defers or compared_for is None:
            return CUDABackend(progress, _open_gpu(device, progress, compared_for), may_sleep=may_sleep, defers=defers)
        opened, compared = _compared_beside(device, progress or no_progress, *compared_for)
        return CUDABackend(progress, opened, may_sleep=may_sleep, defers=True, compared=compared)
    from realizar.backends.cpu.runner import CPUBackend

    return CPUBackend(progress)


def make_span_backend(config: ResolvedConfig, progress: LoadProgress | None = None) -> Backend:
    """A backend of several devices that have some of the layers each (`ResolvedConfig.spans`), not loaded yet.

    Its load raises as `make_backend`.
    """
    from realizar.backends.spans.backend import SpanBackend

    def make(span: LayerSpan, spec: ModelSpec, checkpoint: Checkpoint) -> CPUBackend | CUDABackend:
        return _make_alone(span.config.chosen, progress, (spec, checkpoint) if config.device_check else None)

    return SpanBackend(make)


def begin_compiling(config: EngineConfig) -> None:
    """Compile beside a download what nearly all models run on the CPU, if the next one is to run there."""
    if choose_device(config.device).kind == "cpu":
        from realizar.backends.cpu.load import begin_compiling as begin

        kv_dtype = TRAITS["cpu"].kv_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        begin(config.instruction_set, kv_dtype, default_threads() if config.threads is None else config.threads)


def make_rank(place: RankPlace, device: ChosenDevice) -> Backend:
    """The backend of a rank but the first, not loaded yet, whose place all ranks take at once.

    Raises:
        CapacityError: its GPU can't be opened.
        UnsupportedModelError: the ranks' GPUs differ, or can't reach each other; their kernels are compiled for others.
    """
    if device.kind == "cuda":
        from realizar.backends.cuda.device import open_device

        return _make_gpu_rank(place, open_device(device.index))
    return _make_cpu_rank(place)


def _make_cpu_rank(place: RankPlace, progress: LoadProgress | None = None) -> Backend:
    """Each samples its own logits, so that the bits of all have to be the same."""
    from realizar.backends.cpu.kernel_cache import target
    from realizar.backends.cpu.runner import CPUBackend

    targets = place.exchange(target().encode())
    if len(set(targets)) > 1:
        raise UnsupportedModelError(
            "tensor_parallel needs kernels compiled for one processor, and Numba, used before in this process, compiles"
            f" for its own: {', '.join(sorted({each.decode() for each in targets}))}"
        )
    return CPUBackend(progress, ranks=place.memory)


def _make_gpu_rank(place: RankPlace, opened: DeviceProfile, progress: LoadProgress | None = None) -> Backend:
    """All ranks go without the kernels that one of them goes without."""
    from realizar.backends.cuda.ranks.group import GPUGroup
    from realizar.backends.cuda.runner import CUDABackend

    group = GPUGroup(place, opened.torch_device)
    return CUDABackend(progress, group.like_others(opened), ranks=group)


def make_tower(tower: Tower, checkpoint: Checkpoint, threads: int | None) -> CPUTower:
    """Load an encoder of images on the CPU; `threads` as of `EngineConfig`.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite.
        UnsupportedModelError: a tensor's type does not run.
    """
    from realizar.backends.cpu.tower import CPUTower

    return CPUTower(tower, checkpoint, default_threads() if threads is None else threads)


def tower_on_gpu(
    checkpoint: Checkpoint, config: ResolvedConfig, refusing: Callable[[str], object] | None = None
) -> tuple[Checkpoint, Tower] | None:
    """The encoder of a text model's images that runs on its GPU, and the checkpoint that has it; None without one, and
    where the CPU encodes, as for a model of several GPUs. `refusing` is called with the part that a GPU lacks.
    """
    if config.chosen.kind != "cuda" or config.tensor_parallel > 1 or config.spans:
        return None
    if (found := usable_tower(checkpoint, config.mmproj)[0]) is None:
        return None
    try:
        plan_tower(found[1], found[0], "cuda")
    except UnsupportedModelError as error:
        if refusing is not None:
            refusing(str(error))
        return None
    return found


def make_tower_on_gpu(tower: Tower, checkpoint: Checkpoint, device: ChosenDevice) -> CUDATower:
    """The same on a GPU, in the process that steps the text model: contexts of CUDA would take turns.

    Raises as `make_tower`; CapacityError: it does not fit. KernelError, DeviceLostError: the device can't run it.
    """
    from realizar.backends.cuda.device import open_device
    from realizar.backends.cuda.tower import CUDATower

    return CUDATower(tower, checkpoint, open_device(device.index).torch_device)


def plan_tower(tower: Tower, checkpoint: Checkpoint, kind: Device) -> tuple[int, int]:
    """Bytes of an encoder's weights, and what else the largest picture takes, from headers alone; raises as
    `make_tower`, and UnsupportedModelError where a GPU lacks a part of it.
    """
    if kind == "cuda":
        from realizar.backends.cuda.tower_plan import planned_bytes

        return planned_bytes(tower, checkpoint)
    from realizar.backends.cpu.tower import CPUTower

    return CPUTower.planned_bytes(tower, checkpoint)


def pinned_feature_bytes() -> int:
    """Of the host's memory, that an encoder on a GPU takes for features of pictures."""
    from realizar.backends.cuda.pictures.pinned import pinned_bytes

    return pinned_bytes()


def make_inspected_backend(
    device: ChosenDevice, progress: LoadProgress | None = None,
    compared_for: tuple[ModelSpec, Checkpoint] | None = None,
) -> InspectedBackend:  # fmt: skip
    """A backend as of `make_backend` whose steps can be taken apart."""
    if device.kind == "cuda":
        from realizar.backends.cuda.inspection.backend import InspectedCUDABackend

        return InspectedCUDABackend(progress, _open_gpu(device, progress, compared_for))
    from realizar.backends.cpu.inspection.backend import InspectedCPUBackend

    return InspectedCPUBackend(progress)


def _open_gpu(
    device: ChosenDevice, progress: LoadProgress | None, compared_for: tuple[ModelSpec, Checkpoint] | None
) -> DeviceProfile:
    from realizar.backends.cuda.device import open_device

    opened = open_device(device.index)
    if compared_for is None:
        return opened
    from realizar.backends.verdict.apply import trusted
    from realizar.backends.verdict.small_models import small_models_like

    return trusted(opened, device.label, small_models_like(*compared_for), progress or no_progress)


def begun_load(config: EngineConfig) -> AbstractContextManager[None]:
    """A block for a load, in which the device gets ready while this process imports what it needs.

    Its context is made, and where the load may be the first one a process is begun that compares it with the CPU.
    """
    from realizar.backends.verdict.beside import begun, was_compared

    if config.layers_on is None:
        begin_context(config.device)
    alone = config.tensor_parallel == 1 and config.layers_on is None
    wanted = config.device_check and alone and may_be_gpu(config.device)
    return begun(wanted=wanted and not was_compared())


def _compared_beside(
    device: ChosenDevice, progress: LoadProgress, spec: ModelSpec, checkpoint: Checkpoint
) -> tuple[DeviceProfile, Callable[[], DeviceProfile] | None]:
    """A GPU that another process compares with the CPU meanwhile, and what waits for that, and raises as `trusted`.

    None where all verdicts are kept; where memory may be short for both, it is compared before.
    """
    from realizar.backends.cuda.device import free_bytes, open_device
    from realizar.backends.verdict.apply import is_known, known_faults, trusted
    from realizar.backends.verdict.beside import compare
    from realizar.backends.verdict.small_models import small_models_like

    opened, models = open_device(device.index), small_models_like(spec, checkpoint)
    by_verdicts = partial(trusted, opened, device.label, models, progress)
    if is_known(opened, models) or free_bytes(opened) - checkpoint.size_bytes < _BESIDE_BYTES:
        return by_verdicts(), None
    wait = compare(device.index, list(map(str, models)))

    def compared() -> DeviceProfile:
        progress("comparing the GPU with the CPU", 0.0)
        wait()
        return by_verdicts()

    return replace(opened, without=opened.without | known_faults(opened, models)), compared


def compare_with_cpu(device: ChosenDevice) -> str | None:
    """Compare a GPU with the CPU by a small model of each kind, and keep the verdicts.

    Returns None, or where it differs and what replaces the kernels that it gets wrong; raises as
    `verdict.apply.trusted`.
    """
    from realizar.backends.cuda.device import open_device
    from realizar.backends.verdict.apply import compared_anew

    return compared_anew(open_device(device.index), device.label)


def refusal(spec: ModelSpec, kind: Device) -> str | None:
    """Why the backend of a kind of device refuses a model, whatever the card; None if it runs it."""
    try:
        _supported(kind).check(spec)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _supported(kind: Device) -> Supported:
    if kind == "cuda":
        from realizar.backends.cuda.supported import SUPPORTED
    else:
        from realizar.backends.cpu.supported import SUPPORTED
    return SUPPORTED


def _device_for(spec: ModelSpec, chosen: ChosenDevice) -> ChosenDevice:
    """The chosen device, or the CPU if it alone runs all parts of the model, which is logged."""
    reason = refusal(spec, "cuda") if chosen.kind == "cuda" else None
    if reason is None or refusal(spec, "cpu") is not None:
        return chosen
    _LOG.warning("%s; the CPU runs it", reason)
    return THE_CPU


def _drafts_itself(checkpoint: Checkpoint, config: EngineConfig, chosen: ChosenDevice) -> bool:
    """True if the checkpoint has a next-token block that runs on the device."""
    try:
        block = build_next_token_block(checkpoint, config.context_length)
        reason = None if block is None else refusal(block, chosen.kind)
    except UnsupportedModelError as error:
        block, reason = None, str(error)
    if reason is not None:
        _LOG.warning("%s: drafts come from the text alone", reason)
    return block is not None and reason is None


def plan_memory(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, free_bytes: int | None = None,
    others: OtherModels = NO_OTHERS, *, may_sleep: bool = False,
) -> MemoryPlan:  # fmt: skip
    """Memory that a load will take, from headers alone; `free_bytes` None plans for what is free now.

    An encoder of images that runs on the GPU is part of it: none of a model that may sleep does.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape.
        UnsupportedModelError: a tensor's type does not run, or another model does not suit this one.
        CapacityError: the block size does not suit the device.
        InvalidRequestError: the configuration has no room for drafts.
    """
    if config.spans:
        return plan_of_spans([plan_memory(*_cut(spec, checkpoint, span), free_bytes) for span in config.spans])
    drafter = find_drafter(others, spec, config)
    if config.chosen.kind == "cuda":
        from realizar.backends.cuda.plan import beside_drafter as beside_on_gpu
        from realizar.backends.cuda.plan import plan_memory as plan_for_gpu
        from realizar.backends.cuda.plan import plan_ranks as ranks_on_gpus

        if config.tensor_parallel > 1:
            return ranks_on_gpus(spec, checkpoint, config, _free_of_ranks(config, free_bytes))
        free = _free_on_gpu(config.chosen) if free_bytes is None else free_bytes
        if drafter is not None:
            config = shared_with(config, drafter.spec, beside_on_gpu(drafter, spec, checkpoint, config))
        tower = None if may_sleep else tower_on_gpu(checkpoint, config)
        tower_bytes = 0 if tower is None else sum(plan_tower(tower[1], tower[0], "cuda"))
        plan = plan_for_gpu(spec, checkpoint, config, max(free - tower_bytes, 0))
        return replace(plan, free_bytes=free, tower_bytes=tower_bytes)
    from realizar.backends.cpu.plan import beside_drafter as beside_on_cpu
    from realizar.backends.cpu.plan import plan_memory as plan_for_cpu
    from realizar.backends.cpu.plan import plan_ranks

    if config.tensor_parallel > 1:
        return plan_ranks(spec, checkpoint, config, free_bytes, others)
    if drafter is not None:
        config = shared_with(config, drafter.spec, beside_on_cpu(drafter, spec, checkpoint, config))
    return plan_for_cpu(spec, checkpoint, config, free_bytes)


def _cut(spec: ModelSpec, checkpoint: Checkpoint, span: LayerSpan) -> tuple[ModelSpec, Checkpoint, ResolvedConfig]:
    return cut_layers(spec, span.first, span.stop), checkpoint, span.config


def _free_on_gpu(device: ChosenDevice) -> int:
    from realizar.backends.cuda.device import free_bytes, open_device

    return free_bytes(open_device(device.index))


def _free_of_ranks(config: ResolvedConfig, free_bytes: int | None) -> int:
    """Bytes that are free on each rank's GPU, of which `free_bytes` are one's."""
    if free_bytes is not None:
        return free_bytes
    return min(_free_on_gpu(config.chosen.of_rank(rank)) for rank in range(config.tensor_parallel))


def free_room() -> int:
    """Bytes that are free now for a model, on the device that runs one where none is chosen."""
    device = choose_device("auto")
    return free_memory_bytes() if device.kind == "cpu" else _free_on_gpu(device)


def plan_load(
    spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
) -> MemoryPlan:
    """Like `plan_memory` for the memory that is free now, with the KV cache cut from what the weights leave of it."""
    if config.spans:
        return plan_of_spans([plan_load(*_cut(spec, checkpoint, span)) for span in config.spans])
    plan = plan_memory(spec, checkpoint, config, others=others)
    if config.chosen.kind == "cuda":
        return plan  # its cache is cut so in any case
    left = plan_memory(spec, checkpoint, config, max(plan.free_bytes - plan.needed_bytes, 0), others)
    return replace(left, free_bytes=plan.free_bytes)

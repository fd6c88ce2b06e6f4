"""`make_sampler` chooses what samples the rows of a model: kernels, or the host where a device goes without these."""

from __future__ import annotations

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.sampling import native_buffers
from realizar.backends.cuda.sampling.host_step_sampler import HostStepSampler
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.native_step_sampler import NativeStepSampler
from realizar.backends.cuda.sampling.step_sampler import StepSampler
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.host_sampler import HostSampler
from realizar.backends.load_progress import LoadProgress
from realizar.backends.resolved_config import ResolvedConfig
from realizar.models.spec import ModelSpec


def make_sampler(
    spec: ModelSpec, config: ResolvedConfig, device: DeviceProfile, space: Workspace, progress: LoadProgress
) -> tuple[StepSampler, int]:
    """The sampler, and the bytes of the device that it takes later."""
    rows, vocab, context = config.max_running, spec.vocab_size, config.context_length
    if device.runs("sampling"):
        kernels = SamplingKernels(device.torch_device, vocab, dependent=device.has_dependent_launch)
        reserved = native_buffers.reserved_bytes(space.arrays.sizes.selected, rows, vocab, context)
        return NativeStepSampler(space, context, kernels), reserved
    on_host = HostSampler(rows, vocab, context, config.threads, lambda what: progress(what, 1.0))
    return HostStepSampler(space, on_host), 0

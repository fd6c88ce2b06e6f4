"""The sampler's twin as the fixture `twin`, and as fixtures the samplers of one row that are compared with it."""

from __future__ import annotations

from typing import Any

import pytest

from backends.kernel_sampler import KernelSampler, kernel_logprobs
from backends.reference_sampler.logprobs import token_logprobs
from backends.reference_sampler.sampler import RowSampler
from backends.sampler_twin import SamplerTwin


@pytest.fixture(scope="session", params=[RowSampler, KernelSampler], ids=["reference", "kernel"])
def new_sampler(request: pytest.FixtureRequest) -> Any:
    """A sampler of one row: the reference in numpy, and the CPU's kernel."""
    return request.param


@pytest.fixture(scope="session", params=[token_logprobs, kernel_logprobs], ids=["reference", "kernel"])
def logprobs_of(request: pytest.FixtureRequest) -> Any:
    """Log-probabilities of one row of logits, by the reference and by the kernel."""
    return request.param


@pytest.fixture(scope="session")
def twin() -> type[SamplerTwin]:
    return SamplerTwin

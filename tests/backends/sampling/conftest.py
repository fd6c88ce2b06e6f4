"""The sampler's twin as the fixture `twin`."""

from __future__ import annotations

import pytest

from backends.sampler_twin import SamplerTwin


@pytest.fixture(scope="session")
def twin() -> type[SamplerTwin]:
    return SamplerTwin

"""The two phases of a measurement are apart, and every token is counted."""

from __future__ import annotations

import pytest

from realizar.bench.throughput import GREEDY, RANDOM, measure, next_tokens
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError, ContextLengthError, InvalidRequestError
from realizar.models.generated.generate import generated_header
from realizar.models.registry import build_spec
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from resolving import new_core
from scripted_backend import ScriptedBackend, make_spec


def make_core(backend: ScriptedBackend) -> EngineCore:
    config = EngineConfig(max_step_tokens=1000)
    return new_core(backend, make_spec(backend.windows), config, policy=Policy("prefill"))


@pytest.mark.parametrize(("batch", "steps"), [(1, 3 + 7), (4, 10 + 7)])
def test_phases(batch: int, steps: int) -> None:
    """40 prompt tokens a row in steps of 16, then a step per token."""
    backend = ScriptedBackend(num_blocks=[100])
    core = make_core(backend)
    times = measure(core, batch=batch, prompt_tokens=40, gen_tokens=7)
    assert backend.num_steps == steps
    assert times.prefill_s > 0
    assert times.decode_s > 0
    assert times.prefill_tokens_per_s == batch * 40 / times.prefill_s
    assert times.decode_tokens_per_s == batch * 7 / times.decode_s
    measure(core, batch=batch, prompt_tokens=40, gen_tokens=7)
    assert backend.num_steps == 2 * steps
    core.audit()


def test_rows_are_sampled_as_asked_each_with_a_seed_of_its_own() -> None:
    backend = ScriptedBackend(num_blocks=[100])
    opened: list[SamplingParams] = []
    open_row = backend.open
    backend.open = lambda row: (opened.append(row.sampling), open_row(row))[1]  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    for seed in (0, 1):
        measure(make_core(backend), batch=3, prompt_tokens=16, gen_tokens=2, seed=seed, sampling=sampling)
    assert {(each.temperature, each.top_p) for each in opened} == {(0.8, 0.95)}
    assert len({each.seed for each in opened}) == 6


def test_rows_of_a_mixture_get_random_tokens() -> None:
    dense, mixture = (build_spec(generated_header(shape)) for shape in ("tiny", "tiny-moe"))
    assert [next_tokens(mixture, batch) for batch in (1, 2, 64)] == [GREEDY, RANDOM, RANDOM]
    assert next_tokens(dense, 64) == GREEDY


def test_prefill_alone() -> None:
    backend = ScriptedBackend(num_blocks=[100])
    times = measure(make_core(backend), batch=2, prompt_tokens=16, gen_tokens=0)
    assert backend.num_steps == 2
    assert times.decode_tokens_per_s == 0


@pytest.mark.parametrize(("rows", "blocks"), [(3, 100), (8, 12)])
def test_rows_that_do_not_fit_at_once_are_refused(rows: int, blocks: int) -> None:
    core = make_core(ScriptedBackend(num_blocks=[blocks], max_rows=rows))
    with pytest.raises(CapacityError, match="4 rows of 20 tokens do not fit into memory at once"):
        measure(core, batch=4, prompt_tokens=10, gen_tokens=10)
    assert not core.has_work
    assert measure(core, batch=1, prompt_tokens=10, gen_tokens=10).batch == 1


def test_refusals() -> None:
    core = make_core(ScriptedBackend())
    with pytest.raises(InvalidRequestError, match="batch must be at least 1"):
        measure(core, batch=0, prompt_tokens=1, gen_tokens=1)
    with pytest.raises(ContextLengthError):
        measure(core, batch=1, prompt_tokens=250, gen_tokens=10)

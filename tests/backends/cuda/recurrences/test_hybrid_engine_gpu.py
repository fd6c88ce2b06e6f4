"""Models with states through the engine on a GPU: with `batch_invariant` whatever is reused leaves the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from engine.core.conversations import Chat  # noqa: E402
from engine.core.core_runs import run, tokens  # noqa: E402
from engine.core.late_service import LateService  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.base import Capacity  # noqa: E402
from realizar.backends.cuda.device import open_device  # noqa: E402
from realizar.backends.cuda.recurrences import host_snapshots  # noqa: E402
from realizar.backends.cuda.recurrences.memory import slot_bytes  # noqa: E402
from realizar.backends.cuda.runner import CUDABackend  # noqa: E402
from realizar.backends.cuda.step import CUDAStep  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.engine.core.engine_core import EngineCore  # noqa: E402
from realizar.engine.core.row_grammars import Patience  # noqa: E402
from realizar.outputs import TokenLogprobs  # noqa: E402
from realizar.request import Request  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from realizar.scheduler.pace import Policy  # noqa: E402
from resolving import resolved  # noqa: E402
from scripted_backend import VOCAB_SIZE  # noqa: E402
from step_inputs import TokenOutput  # noqa: E402
from structured.grammar_engines import END  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "feed_forward_size": 256, "context_length": 8192,
    "windows": (None, None, None, 70),
}  # fmt: skip
RECIPES = {
    "convolutions": Recipe(**SIZES, length=3, recurrent=("convolution", None, "convolution")),
    "delta-nets": Recipe(
        **SIZES, parts=("output_gate", "tiled"), recurrent=("delta", "delta"), value_heads=4, key_size=128,
        value_size=128, weights="Q4_K",
    ),
    "float-delta-nets": Recipe(**SIZES, parts=("output_gate",), recurrent=("delta", "delta"), weights="F32"),
}  # fmt: skip
Contents = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


class TightBackend(CUDABackend):
    """Has fewer blocks and snapshots than there is memory for, so that all of them are given up again and again."""

    def capacity(self) -> Capacity:
        found = super().capacity()
        assert found.num_snapshots >= 12
        return replace(found, num_blocks=tuple(min(count, 30) for count in found.num_blocks), num_snapshots=12)


class HostBackend(CUDABackend):
    """Has room for two snapshots on the device, and for those on the host that it was loaded with."""

    def capacity(self) -> Capacity:
        found = super().capacity()
        assert found.num_host_snapshots == 8
        return replace(found, num_blocks=tuple(min(count, 60) for count in found.num_blocks), num_snapshots=2)


def make_core(
    recipe: Recipe, kind: type[CUDABackend] = CUDABackend, *, steps_in_flight: int = 2, core: Any = None, **options: Any
) -> EngineCore:
    spec, checkpoint = random_model(recipe)
    given: dict[str, Any] = {"max_step_tokens": 96, "kv_cache_bytes": 256 << 20, "batch_invariant": True, **options}
    settled = resolved(spec, checkpoint, EngineConfig(**given), "cuda")
    settled = replace(settled, steps_in_flight=steps_in_flight)
    backend = kind(device=open_device())
    backend.load(spec, checkpoint, settled)
    return EngineCore(backend, spec, settled, policy=Policy(stretch=math.inf), **(core or {}))


def contents(outputs: Sequence[TokenOutput]) -> Contents:
    """Tokens, their log-probabilities and those of the prompt."""
    return (
        tokens(list(outputs)),
        [each for output in outputs for each in output.logprobs],
        [each for output in outputs for each in output.prompt_logprobs],
    )


def texts(core: EngineCore, requests: Sequence[Request]) -> dict[str, Contents]:
    """What each request gets, all of them added at once."""
    for request in requests:
        core.add(request)
    return {name: contents(outputs) for name, outputs in run(core).items()}


def some_requests(recipe: Recipe) -> list[Request]:
    """Prompts of one token, of several chunks, and of text that repeats; greedy and sampled."""
    found = []
    for index, length in enumerate((1, 2, 3, 9, 30, 60, 70, 200)):
        sampling = SamplingParams(temperature=float(index % 2), seed=index, logprobs=2)
        prompt = tuple(random_tokens(recipe, length, index))
        found.append(Request(f"r{index}", (prompt * 7)[:60] if index == 3 else prompt, sampling, 60))
    return found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("drafts", "steps_in_flight"), [(0, 2), (3, 1), (16, 2)])
@pytest.mark.parametrize("requests", [60, pytest.param(200, marks=pytest.mark.full)])
def test_conversations_have_the_bits_of_fresh_ones(name: str, drafts: int, steps_in_flight: int, requests: int) -> None:
    """Snapshots taken, restored and dropped, preemption, aborts, and drafts: 16 make a row of 17."""
    options = {"context_length": 640, "speculative_tokens": drafts}
    core = make_core(RECIPES[name], TightBackend, steps_in_flight=steps_in_flight, max_running=5, **options)
    fresh = make_core(RECIPES[name], max_running=1, context_length=640, prefix_cache=False)
    try:
        chat = Chat(7 + drafts, core, scale=4, few_ids=drafts > 0)
        chat.run(requests)
        for request, choices in chat.ended:
            alone: list[list[TokenOutput]] = [[] for _ in choices]
            fresh.add(request)
            for output in run(fresh)[request.request_id]:
                alone[output.choice].append(output)
            assert [contents(each) for each in choices] == [contents(each) for each in alone]
        assert min(core.cache.snapshots.counts.restored, core.cache.snapshots.counts.dropped) > 10
        assert core.scheduler.counts.accepted_tokens > 0 or not drafts
    finally:
        core.close()
        fresh.close()


@pytest.mark.parametrize("name", ["convolutions", "delta-nets"])
@pytest.mark.parametrize(("drafts", "steps_in_flight"), [(0, 2), (3, 1)])
@pytest.mark.parametrize("requests", [60, pytest.param(200, marks=pytest.mark.full)])
def test_conversations_with_snapshots_in_the_hosts_memory(
    name: str, drafts: int, steps_in_flight: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave the device while steps compute, and are fetched before others. Each is pinned when it first comes."""
    monkeypatch.setattr(host_snapshots, "_PIECE_BYTES", 1)
    recipe, options = RECIPES[name], {"context_length": 640, "speculative_tokens": drafts}
    spec, checkpoint = random_model(recipe)
    settled = resolved(spec, checkpoint, EngineConfig(max_running=5, max_step_tokens=96, **options), "cuda")
    on_host = 8 * slot_bytes(spec, settled)
    core = make_core(
        recipe, HostBackend, steps_in_flight=steps_in_flight, max_running=5, host_snapshot_bytes=on_host, **options
    )
    fresh = make_core(recipe, max_running=1, prefix_cache=False, **options)
    try:
        chat = Chat(21 + drafts, core, scale=4, few_ids=drafts > 0)
        chat.run(requests)
        for request, choices in chat.ended:
            alone: list[list[TokenOutput]] = [[] for _ in choices]
            fresh.add(request)
            for output in run(fresh)[request.request_id]:
                alone[output.choice].append(output)
            assert [contents(each) for each in choices] == [contents(each) for each in alone]
        assert min(core.cache.snapshots.counts.stored, core.cache.snapshots.counts.fetched) > 3
    finally:
        core.close()
        fresh.close()


@pytest.mark.parametrize("name", RECIPES)
def test_graphs_and_batches_leave_the_same_bits(name: str) -> None:
    """All requests together by graphs, without graphs, and each alone."""
    found = []
    for options in ({"max_running": 8}, {"max_running": 8, "graphs": False}, {"max_running": 1}):
        core = make_core(RECIPES[name], context_length=512, **options)
        found.append(texts(core, some_requests(RECIPES[name])))
        core.close()
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def service() -> Iterator[LateService]:
    made = LateService()
    yield made
    made.end()


@pytest.mark.parametrize("name", ["convolutions", "delta-nets"])
@pytest.mark.parametrize(("drafts", "steps_in_flight"), [(0, 2), (4, 1)])
def test_rows_that_are_deferred(
    name: str, drafts: int, steps_in_flight: int, service: LateService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that come several steps late, beside rows without a grammar."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    grammar = StructuredOutput("regex", "[a-z]{10,30}")
    requests = [
        replace(each, sampling=replace(each.sampling, structured=grammar, stop_token_ids=(END,))) if index % 3 else each
        for index, each in enumerate(some_requests(RECIPES[name]))
    ]
    deferred, defer = 0, CUDAStep.defer

    def count(self: CUDAStep, rows: Collection[int]) -> None:
        nonlocal deferred
        deferred += len(rows)
        defer(self, rows)

    monkeypatch.setattr(CUDAStep, "defer", count)
    found = []
    lateness: Sequence[Callable[[Any], int]] = (lambda _: 0, lambda row: (row.slot * 7 + len(row.output) * 3) % 5)
    for late, rows in zip(lateness, (1, 6), strict=True):
        monkeypatch.setattr(service, "lateness", late)
        options = {"context_length": 512, "max_running": rows, "speculative_tokens": drafts if rows > 1 else 0}
        grammars = {"new_grammars": lambda: service}
        core = make_core(RECIPES[name], steps_in_flight=steps_in_flight, core=grammars, **options)
        found.append(texts(core, requests))
        core.close()
    assert found[0] == found[1]
    assert deferred > 20


@pytest.mark.parametrize("name", RECIPES)
def test_long_prompts(name: str) -> None:
    """5,000 tokens: token by token all chunks leave the same bits, and by tiles nearly the same logits."""
    recipe, found = RECIPES[name], []
    ids = random_tokens(recipe, 5003, 3)
    config = EngineConfig(max_running=2, max_step_tokens=2048, kv_cache_bytes=512 << 20, context_length=8192)
    for invariant, cuts in (
        (True, ((2048, 2048, 904), (1999, 17, 1, 2048, 65, 870))),
        (False, ((2048, 2048, 896, 5, 3),)),
    ):
        runner = GPURunner(*random_model(recipe), replace(config, batch_invariant=invariant))
        for row, chunks in enumerate(cuts):
            request = runner.request(row, ids)
            for chunk in chunks:
                runner.step([(request, chunk)])
            while request.computed < len(ids):
                runner.step([(request, 1)])
            found.append(request.values()[-40:])
        runner.close()
    assert (found[0] == found[1]).all()
    errors = np.linalg.norm(found[2] - found[0], axis=-1) / np.linalg.norm(found[0], axis=-1)
    assert errors.max() < (1e-3 if name == "float-delta-nets" else 0.05)


def test_scanned_chunks_have_the_same_bits_by_graphs() -> None:
    """Rows of uneven chunks beside each other, some beginning in the middle of a tile, and decodes."""
    recipe, found = RECIPES["delta-nets"], []
    prompts = [random_tokens(recipe, length, length) for length in (500, 333, 62)]
    for graphs in (True, False):
        config = EngineConfig(
            max_running=4, max_step_tokens=512, kv_cache_bytes=256 << 20, context_length=1024, graphs=graphs
        )
        runner = GPURunner(*random_model(recipe), config)
        requests = [runner.request(row, each, first=row * 32) for row, each in enumerate(prompts)]
        for counts in ((200, 130, 61), (17, 65, 1), (1, 100, 0), (282, 38, 0)):
            runner.step([part for part in zip(requests, counts, strict=True) if part[1]])
        found.append([each.values() for each in requests])
        runner.close()
    for ours, theirs in zip(*found, strict=True):
        assert np.isfinite(ours).all()
        assert (ours == theirs).all()

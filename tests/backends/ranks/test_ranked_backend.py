"""A model that several processes compute together: the same tokens, whoever shares a step, and a clean end."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.ranks import stalled_rank
from engine.core.test_disk_cache import fetch_now, save
from realizar import LLM
from realizar.backends.base import ForwardInput, SavesCache
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.devices import ChosenDevice
from realizar.backends.ranks import backend as ranked
from realizar.backends.ranks.messages import Submit, pack_masks, pack_step, unpack_masks, unpack_step
from realizar.backends.select import plan_memory, resolve_model
from realizar.batch import LogprobQuery, StateMoves, StepRows
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import DeviceLostError, EngineDeadError, InvalidRequestError, RealizarError, UnsupportedModelError
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from step_inputs import TokenOutput, stepped
from tiny_model import write_tiny_model
from waits import HANG_S, child_commands, wait_until

_CONFIG = EngineConfig(
    device="cpu", threads=2, tensor_parallel=2, context_length=256, max_running=4, max_step_tokens=64,
    kv_cache_bytes=4 << 20,
)  # fmt: skip
_PHONE = StructuredOutput("regex", r"[0-9]{3}-[0-9]{4}")
_SAMPLED = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.2, n=2),
    SamplingParams(temperature=0.8, seed=7, top_k=20, min_p=0.05),
    SamplingParams(temperature=1.0, seed=1, structured=_PHONE, n=2),
    SamplingParams(temperature=0.0, prompt_logprobs=1, logit_bias={7: 5.0}),
)


@pytest.fixture(scope="module", params=["tiny-moe", "tiny-delta"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks") / f"{request.param}.gguf"
    write_tiny_model(found, shape=request.param)
    return found


@contextmanager
def loaded(config: EngineConfig, path: Path, **changes: object) -> Iterator[EngineCore]:
    core = load_core(find_checkpoint(path), replace(config, **changes))  # type: ignore[arg-type]
    try:
        yield core
    finally:
        core.close()


_loaded = partial(loaded, _CONFIG)


def mixed_requests() -> list[Request]:
    return [
        Request(f"r{index}", tuple(range(3 + index % 2, 40 + 11 * index)), params, 12)
        for index, params in enumerate(_SAMPLED)
    ]


def run_all(core: EngineCore, requests: Sequence[Request]) -> dict[tuple[str, int], list[TokenOutput]]:
    for request in requests:
        core.add(request)
    found: dict[tuple[str, int], list[TokenOutput]] = {}
    while core.has_work:
        for output in stepped(core):
            found.setdefault((output.request_id, output.choice), []).append(output)
        core.audit()
    return found


def texts_of(found: dict[tuple[str, int], list[TokenOutput]]) -> dict[tuple[str, int], object]:
    """Tokens, and the bits of all log-probabilities, by choice."""
    return {
        key: (
            [token_id for each in outputs for token_id in each.token_ids],
            [entry.logprob for each in outputs for entry in (*each.prompt_logprobs, *each.logprobs)],
            outputs[-1].error,
        )
        for key, outputs in found.items()
    }


def check_same_bits(config: EngineConfig, path: Path, **of_alone: object) -> None:
    """Prompts in chunks beside answers, shared prefixes, samplers, masks, more choices than rows."""
    with loaded(config, path) as core:
        together = texts_of(run_all(core, mixed_requests()))
        assert len(together) == 7
        assert texts_of(run_all(core, mixed_requests())) == together
    with loaded(config, path, prefix_cache=False, **of_alone) as core:
        alone: dict[tuple[str, int], object] = {}
        for request in mixed_requests():
            alone |= texts_of(run_all(core, [request]))
    assert alone == together


def test_the_same_bits_together_alone_and_anew(path: Path) -> None:
    check_same_bits(_CONFIG, path)


def test_files_of_the_cache_have_the_parts_of_all_ranks(path: Path, tmp_path: Path) -> None:
    """A new engine goes on from them with the bits of the old one; one process finds nothing in them."""
    request = Request("r", tuple(range(3, 150)), SamplingParams(temperature=0.0, logprobs=2), 8, prompt_marks=(128,))
    with _loaded(path, cache_dir=str(tmp_path)) as core:
        before = texts_of(run_all(core, [request]))
        save(core)
        assert core.disk_counts.saved >= 4
    with _loaded(path, cache_dir=str(tmp_path)) as core:
        fetch_now(core, request)
        assert texts_of(run_all(core, [request])) == before
        assert core.disk_counts.fetched >= 4
        assert core.scheduler.counts.prefix_cache_hits == 128
        backend = core._backend
        assert isinstance(backend, SavesCache)
        os.kill(rank_processes()[0], signal.SIGKILL)
        with pytest.raises(DeviceLostError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
            backend.read_cached(0, [0])
    with _loaded(path, cache_dir=str(tmp_path), tensor_parallel=1) as core:
        assert core.fetch(request, lambda *_: None) is None


def check_log_probabilities(config: EngineConfig, path: Path) -> tuple[int, int]:
    """They are one rank's but for the rounding of activations; the bytes of weights of one and of both."""
    prompt, found = tuple(range(3, 100)), []
    for ranks in (1, 2):
        request = Request("r", prompt, SamplingParams(temperature=0.0, prompt_logprobs=1), 1)
        with loaded(config, path, tensor_parallel=ranks) as core:
            (outputs,) = run_all(core, [request]).values()
            found.append([entry.logprob for each in outputs for entry in each.prompt_logprobs])
            found.append([core.capacity.weight_bytes])
    (alone, (size,), together, (sizes,)) = found
    assert len(alone) == len(prompt) - 1
    np.testing.assert_allclose(together, alone, atol=0.1)
    assert np.mean(np.abs(np.subtract(together, alone))) < 0.02
    return int(size), int(sizes)


def test_log_probabilities_are_those_of_one_process(path: Path) -> None:
    size, sizes = check_log_probabilities(_CONFIG, path)
    assert size <= sizes < 1.2 * size  # parts are filled up to whole tiles


def rank_processes() -> list[int]:
    found = child_commands(os.getpid())
    return [process for process, command in found.items() if b"backends.ranks.process" in command]


def the_rank() -> int:
    wait_until(lambda: len(rank_processes()) == 1)  # a process that has just begun shows no command
    return rank_processes()[0]


def check_lost_in_load(
    config: EngineConfig, path: Path, kind: type[Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """`kind` is the backend of each rank, whose load begins when the other one gets the signal."""
    load = kind.load

    def load_without_another(backend: Any, *arguments: Any) -> None:
        os.kill(the_rank(), number)
        load(backend, *arguments)

    monkeypatch.setattr(kind, "load", load_without_another)
    with pytest.raises(DeviceLostError, match=r"^rank 1 of 2 \(process \d+\) was (killed by SIGKILL|stopped)$"):
        load_core(find_checkpoint(path), config)
    assert not rank_processes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_load(tiny: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Also where the device is to be found, and the CPU would take another's place."""
    monkeypatch.setattr(ranked, "_LOOK_S", 0.1)
    config = replace(_CONFIG, device="auto" if number == signal.SIGKILL else "cpu")
    check_lost_in_load(config, tiny, CPUBackend, monkeypatch, number)


def step_on(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def check_lost_in_step(config: EngineConfig, path: Path, number: signal.Signals) -> None:
    with loaded(config, path, context_length=2048) as core:
        core.add(Request("r", (1, 2, 3), SamplingParams(temperature=0.0, ignore_eos=True), 1900))
        for _ in range(5):
            core.step()
        process = the_rank()
        os.kill(process, number)
        expected = "killed by SIGKILL" if number == signal.SIGKILL else "was stopped"
        with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(process {process}\) (was )?{expected}$"):
            step_on(core)
        with pytest.raises(EngineDeadError):
            core.add(Request("s", (1, 2, 3), SamplingParams(temperature=0.0), 4))
    assert not rank_processes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_engine(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(ranked, "_LOOK_S", 0.1)
    monkeypatch.setattr(ranked, "_MOST_SILENT", 10 * HANG_S)  # a busy machine may keep either waiting
    check_lost_in_step(_CONFIG, tiny, number)


def test_a_new_llm_may_follow_one_whose_rank_is_gone(tiny: Path) -> None:
    with LLM(tiny, device="cpu", threads=2, tensor_parallel=2, context_length=128) as llm:
        os.kill(the_rank(), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"was killed by SIGKILL; close this LLM and make a new one$"):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4))


def check_stalled(config: EngineConfig, path: Path, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    """A rank that does nothing any more, though no signal has stopped it, ends the engine."""
    monkeypatch.setattr(ranked, "_COMMAND", (sys.executable, stalled_rank.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with loaded(config, path) as core:
        core.add(Request("r", (1, 2, 3), SamplingParams(temperature=0.0, ignore_eos=True), 100))
        with pytest.raises(EngineDeadError, match=expected):
            step_on(core)
    assert not any(b"stalled_rank" in command for command in child_commands(os.getpid()).values())


def test_a_rank_that_stalls_ends_the_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked, "_LOOK_S", 0.1)
    check_stalled(_CONFIG, tiny, monkeypatch, "rank 1 of 2 has stalled$")


def test_loads_leave_nothing(tiny: Path) -> None:
    """No process, no descriptor, no memory."""
    counts = []
    for _ in range(3):
        with _loaded(tiny) as core:
            run_all(core, mixed_requests()[:1])
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert not rank_processes()
    assert counts[1] == counts[-1]
    gc.collect()
    assert "realizar-ranks" not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_load_that_fails_in_another_rank_says_why(tiny: Path) -> None:
    gone = tiny.with_name("gone.gguf")
    gone.write_bytes(tiny.read_bytes())
    checkpoint = find_checkpoint(gone)
    gone.unlink()
    with pytest.raises(RealizarError, match=r"gone\.gguf"):
        load_core(checkpoint, _CONFIG)
    assert not rank_processes()


def test_ranks_whose_kernels_are_of_other_processors_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bits may differ, and with them the tokens that each samples."""
    monkeypatch.setattr("realizar.backends.cpu.kernel_cache.target", lambda: "another")
    with pytest.raises(UnsupportedModelError, match=r"needs kernels compiled for one processor.*: another, "):
        load_core(find_checkpoint(tiny), _CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_bytes": 1 << 50}, "kv_cache_bytes of .* is more than this machine's"),
        ({"threads": 1}, "tensor_parallel 2 needs as many threads, and there are 1"),
    ],
)
def test_what_ranks_do_not_do_is_refused(tiny: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        load_core(find_checkpoint(tiny), replace(_CONFIG, **changes))  # type: ignore[arg-type]


def test_gpus_in_one_order_and_heads_that_do_not_divide_are_refused(tiny: Path, tmp_path: Path) -> None:
    checkpoint, of_three = find_checkpoint(tiny), replace(_CONFIG, tensor_parallel=3, batch_invariant=True)
    with pytest.raises(InvalidRequestError, match="sums in one order, which those of 3 GPUs have not"):
        resolve_model(checkpoint, of_three, ChosenDevice("cuda", 0))
    with pytest.raises(InvalidRequestError, match="tensor_parallel on GPUs has no drafter but the text so far"):
        resolve_model(checkpoint, replace(_CONFIG, drafter="another.gguf"), ChosenDevice("cuda", 0))
    with pytest.raises(InvalidRequestError, match="tensor_parallel on GPUs keeps no cache in cache_dir so far"):
        resolve_model(checkpoint, replace(_CONFIG, cache_dir="kept"), ChosenDevice("cuda", 0))
    write_tiny_model(tmp_path / "states.gguf", shape="tiny-convolution")
    with pytest.raises(InvalidRequestError, match="lfm2: a model whose layers have states runs on one GPU so far"):
        resolve_model(find_checkpoint(tmp_path / "states.gguf"), _CONFIG, ChosenDevice("cuda", 0), 1 << 30)
    with pytest.raises(UnsupportedModelError, match="which 7 ranks can't share evenly"):
        load_core(checkpoint, replace(_CONFIG, threads=7, tensor_parallel=7))


def test_a_plan_is_of_all_gpus(tiny: Path) -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    checkpoint, plans, free = find_checkpoint(tiny), [], 8 << 30
    for ranks in (1, 2):
        config = replace(_CONFIG, device="cuda", tensor_parallel=ranks, kv_cache_bytes=None)
        spec, resolved = resolve_model(checkpoint, config, ChosenDevice("cuda", 0))
        plans.append(plan_memory(spec, checkpoint, resolved, free))
    alone, together = plans
    assert together.free_bytes == 2 * free
    assert alone.weight_bytes <= together.weight_bytes < 1.2 * alone.weight_bytes
    assert alone.workspace_bytes < together.workspace_bytes
    assert together.kv_bytes_per_token == alone.kv_bytes_per_token
    assert together.contexts[-1].num_requests > 1.9 * alone.contexts[-1].num_requests


def test_a_plan_is_of_all_ranks(tiny: Path) -> None:
    checkpoint, plans = find_checkpoint(tiny), []
    for ranks in (1, 2):
        spec, config = resolve_model(checkpoint, replace(_CONFIG, tensor_parallel=ranks))
        plans.append(plan_memory(spec, checkpoint, config))
    alone, together = plans
    assert alone.weight_bytes <= together.weight_bytes < 1.1 * alone.weight_bytes
    assert together.kv_limit_bytes == alone.kv_limit_bytes
    assert together.kv_bytes_per_token == alone.kv_bytes_per_token
    assert [each.num_requests for each in together.contexts] == [each.num_requests for each in alone.contexts]
    with _loaded(tiny) as core:
        assert core.capacity.weight_bytes == together.weight_bytes


def test_a_step_goes_as_bytes() -> None:
    computed, ids, starts, drafts, uncertain = (
        np.array(each, np.int32) for each in ([0, 4], [1, 2, 3], [0, 2, 3], [0, 0], [1, 1])
    )
    columns = StepRows(
        np.array([5, 9]), np.array([1, 0], np.intp), computed, ids, starts, np.array([True, False]), drafts, uncertain,
        logprob_queries={1: (LogprobQuery(0, 4, 2), LogprobQuery(1, None, 0))}, pooling={0: "mean"},
        lookahead=np.array([3, 0], np.int32), embeddings=((1, np.ones((1, 3), np.float32)),), images=((1, 1),),
    )  # fmt: skip
    tables = np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((2, 0), np.int32)
    slots = np.arange(3, dtype=np.int32), np.arange(3, 6, dtype=np.int32)
    step = ForwardInput(columns, np.array([0, 1, 4], np.int32), slots, tables, StateMoves(taken=((1, 0),)))
    encoded = msgspec.msgpack.encode(pack_step(step))
    found = unpack_step(msgspec.msgpack.decode(encoded, type=Submit))
    for field in fields(StepRows):
        given, taken = getattr(columns, field.name), getattr(found.columns, field.name)
        if isinstance(given, np.ndarray):
            np.testing.assert_array_equal(taken, given)
            assert taken.dtype == given.dtype
        elif field.name == "embeddings":
            assert taken[0][0] == given[0][0]
            np.testing.assert_array_equal(taken[0][1], given[0][1])
        else:
            assert taken == given
    for given, taken in zip(
        (*tables, *slots, step.positions), (*found.block_tables, *found.slot_mapping, found.positions), strict=True
    ):
        np.testing.assert_array_equal(taken, given)
    assert found.state_moves == step.state_moves
    masks = {3: np.arange(4, dtype=np.uint32), 0: np.arange(8, dtype=np.uint32).reshape(2, 4)}
    for row, mask in unpack_masks(pack_masks(masks)).items():
        np.testing.assert_array_equal(mask, masks[row])

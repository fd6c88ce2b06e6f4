"""Streams and whole outputs through the in-process client, with a vocabulary that spells numbers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from number_text import NumberText, spelled
from realizar.config import EngineConfig
from realizar.engine.clients.engine_client import EngineClient, RequestStream
from realizar.engine.clients.interrupts import interrupts_deferred
from realizar.errors import ContextLengthError, EngineDeadError, InvalidRequestError, RealizarError, RequestFailedError
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, expected_tokens, history_states, logprobs_of, make_spec
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def make_client(backend: ScriptedBackend | None = None, end_ids: tuple[int, ...] = ()) -> EngineClient:
    backend = backend or ScriptedBackend()
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_step_tokens=1000))
    return EngineClient(core, NumberText, end_ids)


def test_deltas_concatenate_to_the_whole() -> None:
    client = make_client()
    wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
    with client.submit([1, 2], GREEDY, prompt="one two") as stream:
        deltas = list(stream)
        output = stream.result()
    assert "".join(delta.text for delta in deltas) == output.outputs[0].text == spelled(wanted)
    assert [token for delta in deltas for token in delta.token_ids] == list(output.outputs[0].token_ids) == wanted
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]
    assert (output.prompt, output.prompt_token_ids) == ("one two", (1, 2))
    assert output.timings.arrival_s <= output.timings.scheduled_s <= output.timings.first_token_s
    assert output.timings.decode_s > 0
    assert output.decode_tokens_per_s == pytest.approx(7 / output.timings.decode_s)
    assert output.prompt_tokens_per_s == pytest.approx(2 / output.timings.prefill_s)


def test_a_stop_string_ends_the_row_too() -> None:
    wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
    stop = f"{wanted[3]} "
    backend = ScriptedBackend()
    client = make_client(backend)
    output = client.submit([1, 2], SamplingParams(temperature=0.0, stop=(stop,))).result().outputs[0]
    assert output.text == spelled(wanted[:3])
    assert (output.finish_reason, output.stop_reason, list(output.token_ids)) == ("stop", stop, wanted[:4])
    client.submit([5], GREEDY).result()
    assert (backend.num_steps, backend.most_rows) == (4 + 8, 1)


def test_a_stop_token_has_no_text() -> None:
    wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
    client = make_client(end_ids=(wanted[2],))
    output = client.submit([1, 2], GREEDY).result().outputs[0]
    assert output.text == spelled(wanted[:2])
    assert (output.finish_reason, output.stop_reason, list(output.token_ids)) == ("stop", wanted[2], wanted[:3])
    ignoring = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert client.submit([1, 2], ignoring).result().outputs[0].text == spelled(wanted)


def test_every_choice_has_its_own_text() -> None:
    sampling = SamplingParams(seed=5, max_tokens=6, n=3, logprobs=1)
    stream = make_client().submit([4], sampling)
    deltas = list(stream)
    for index, output in enumerate(stream.result().outputs):
        wanted = expected_tokens([4], (None,), sampling, 6, index)
        assert (output.index, output.text) == (index, spelled(wanted))
        assert "".join(delta.text for delta in deltas if delta.choice == index) == output.text
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == wanted


def test_without_a_seed_every_request_draws_its_own() -> None:
    client = make_client()
    texts = {client.submit([4], SamplingParams(max_tokens=6)).result().outputs[0].text for _ in range(5)}
    assert len(texts) == 5


def test_scoring_generates_nothing() -> None:
    prompt = [3, 1, 4, 1, 5]
    output = make_client().submit(prompt, SamplingParams(prompt_logprobs=3), score_only=True).result()
    states = history_states(prompt, (None,))
    assert output.prompt_logprobs == (None, *(logprobs_of(states[at], prompt[at + 1], 3) for at in range(4)))
    assert output.outputs[0].token_ids == ()
    assert output.num_generated_tokens == 0
    assert output.decode_tokens_per_s == 0


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    client = make_client(ScriptedBackend(context_length=40))
    assert len(client.submit([1] * 10, SamplingParams(temperature=0.0)).result().outputs[0].token_ids) == 30
    with pytest.raises(ContextLengthError, match="the prompt has 40 and 1 are to be generated"):
        client.submit([1] * 40, SamplingParams())


def test_a_small_cache_bounds_the_default_of_max_tokens() -> None:
    client = make_client(ScriptedBackend(num_blocks=[5]))
    assert len(client.submit([1] * 10, SamplingParams(temperature=0.0)).result().outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ([97], SamplingParams(), "prompt"),
        ([1, -1], SamplingParams(), "prompt"),
        ([1], SamplingParams(logit_bias={97: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop_token_ids=(97,)), "stop_token_ids"),
        ([1], SamplingParams(dry_sequence_breakers=(-1,)), "dry_sequence_breakers"),
        ([1], SamplingParams(logprobs=98), "logprobs"),
        ([1], SamplingParams(prompt_logprobs=98), "prompt_logprobs"),
    ],
)
def test_refusals_name_the_field(prompt: list[int], sampling: SamplingParams, param: str) -> None:
    client = make_client()
    with pytest.raises(InvalidRequestError) as caught:
        client.submit(prompt, sampling)
    assert caught.value.param == param
    assert len(client.submit([1], GREEDY).result().outputs[0].token_ids) == 8


def test_a_dead_engine_reaches_every_waiter() -> None:
    client = make_client(ScriptedBackend(fail_at=4))
    streams = [client.submit([index], GREEDY) for index in range(3)]
    deltas = []
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        deltas.extend(streams[0])
    for stream in streams:
        with pytest.raises(EngineDeadError, match="fell off the bus"):
            stream.result()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        client.submit([1], GREEDY)


def test_a_waiting_thread_raises_when_the_engine_closes() -> None:
    client = make_client(ScriptedBackend(context_length=4000, num_blocks=[1000]))
    caught: list[Exception] = []
    started = threading.Event()

    def wait() -> None:
        try:
            for _ in client.submit([1], SamplingParams(temperature=0.0)):
                started.set()
                time.sleep(0.02)  # so that it lasts for more than a minute
        except RealizarError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(HANG_S)
    client.close()
    thread.join(HANG_S)
    assert [str(error) for error in caught] == ["the engine was closed"]
    assert isinstance(caught[0], EngineDeadError)


def test_threads_share_one_engine() -> None:
    backend = ScriptedBackend(num_blocks=[200])
    client = make_client(backend)
    texts: dict[int, str] = {}

    def ask(index: int) -> None:
        stream = client.submit([index], SamplingParams(temperature=0.0, max_tokens=30))
        texts[index] = "".join(delta.text for delta in stream)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert texts == {index: spelled(expected_tokens([index], (None,), GREEDY, 30)) for index in range(8)}


def test_closing_a_stream_frees_its_row() -> None:
    backend = ScriptedBackend(num_blocks=[64], max_rows=1)
    client = make_client(backend)
    with client.submit([1], SamplingParams(temperature=0.0)) as stream:
        next(iter(stream))
    with pytest.raises(RealizarError, match="the request was closed"):
        stream.result()
    assert client.submit([2], GREEDY).result().outputs[0].finish_reason == "length"


def test_text_that_fails_costs_only_its_own_request() -> None:
    client = make_client()
    good = client.submit([1], GREEDY)
    bad = client.submit([1, 2], SamplingParams(stop=("?",)))
    with pytest.raises(RequestFailedError, match="could not be turned into text"):
        bad.result()
    assert good.result().outputs[0].text == spelled(expected_tokens([1], (None,), GREEDY, 8))


class FailingText(NumberText):
    """Text that fails at its first tokens where the request has this seed."""

    SEED = 7

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__(sampling)
        self._fails = sampling.seed == self.SEED

    def add(self, token_ids: Sequence[int]) -> str:
        if self._fails:
            raise ValueError("no such number")
        return super().add(token_ids)


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("n", [1, 2])
def test_text_that_fails_when_it_is_taken_costs_only_its_own_request(n: int, max_tokens: int) -> None:
    """The text of all choices fails in one step, in which they end or not, beside a stream that drives the steps."""
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig(max_step_tokens=1000))
    client = EngineClient(core, FailingText)
    sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=FailingText.SEED)
    bad = client.submit([1, 2], sampling)
    good = client.submit([1], replace(GREEDY, max_tokens=max_tokens))
    other_bad = client.submit([1, 2, 3], sampling)
    wanted = spelled(expected_tokens([1], (None,), GREEDY, max_tokens))
    assert good.result().outputs[0].text == wanted
    for stream in (bad, other_bad):
        with pytest.raises(RequestFailedError, match="could not be turned into text"):
            list(stream)
    assert core.counts.running == 0
    assert client.submit([1], replace(GREEDY, max_tokens=max_tokens)).result().outputs[0].text == wanted


def test_closing_reaches_every_stream_though_a_text_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig(max_step_tokens=1000))
    client = EngineClient(core, FailingText)
    sampling = SamplingParams(max_tokens=8, n=2, seed=FailingText.SEED)
    streams = [client.submit([1, 2], sampling), client.submit([1], GREEDY)]
    with monkeypatch.context() as patch:
        patch.setattr(RequestStream, "take_noted", lambda self: None)  # the step's deltas are not taken yet
        for _ in range(3):
            client._step()
    client.close()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="closed"):
            list(stream)


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Python's own handler of interrupts, which a shell that starts tests in the background leaves out."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handler")
def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    steps = []

    def step() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            steps.append("whole")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)

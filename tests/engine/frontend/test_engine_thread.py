"""Streams and whole outputs for threads without an event loop, with a vocabulary that spells numbers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from number_text import NumberText, spelled
from realizar.config import EngineConfig
from realizar.engine.frontend.engine_thread import RequestStream
from realizar.errors import ContextLengthError, EngineDeadError, InvalidRequestError, RealizarError, RequestFailedError
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import StepDeltas
from resolving import EngineClient, new_core
from scripted_backend import ScriptedBackend, expected_tokens, history_states, logprobs_of, make_spec
from waits import HANG_S, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
OPENED: list[EngineClient] = []


def make_client(backend: ScriptedBackend | None = None, end_ids: tuple[int, ...] = ()) -> EngineClient:
    backend = backend or ScriptedBackend()
    core = new_core(backend, make_spec(backend.windows), EngineConfig(max_step_tokens=1000))
    OPENED.append(EngineClient(core, NumberText, end_ids))
    return OPENED[-1]


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


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

    async def begin() -> list[RequestStream]:
        """All three, before the first step."""
        return [RequestStream(await client.engine.generate([index], GREEDY), client) for index in range(3)]

    streams = client.run(begin())
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


ENDLESS = SamplingParams(temperature=0.0)


def a_long_client() -> EngineClient:
    return make_client(ScriptedBackend(context_length=40_000, num_blocks=[10_000]))


def wait_until_idle(client: EngineClient) -> None:
    wait_until(lambda: not client.engine.num_open and not client.core.scheduler.counts.num_running)


def test_a_stream_that_nobody_has_any_more_ends() -> None:
    """Left amid its iteration, or never iterated."""
    client = a_long_client()
    for _ in client.submit([1], ENDLESS):
        break
    client.submit([2], ENDLESS)
    wait_until_idle(client)


def test_a_stream_keeps_its_engine() -> None:
    client = a_long_client()
    core, thread = client.core, client._thread
    OPENED.remove(client)
    stream = client.submit([1], replace(ENDLESS, max_tokens=2000))
    del client
    assert len(stream.result().outputs[0].token_ids) == 2000
    del stream
    thread.join(HANG_S)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        core.step()


def test_garbage_that_closes_a_stream_amid_a_step_does_not_stop_the_engine() -> None:
    """A generator in a cycle, which the engine's thread collects."""
    client = a_long_client()
    cycles: list[list[object]] = [[]]

    def deltas() -> Iterator[str]:
        with client.submit([1], ENDLESS) as stream:
            for delta in stream:
                yield delta.text

    generator = deltas()
    next(generator)
    cycles[0] += [generator, cycles[0]]
    del generator
    step = client.core.step

    def collecting_step() -> StepDeltas:
        if cycles:
            cycles.clear()
            gc.collect()
        return step()

    client.core.step = collecting_step  # type: ignore[method-assign]
    gc.disable()
    try:
        wait_until_idle(client)
    finally:
        gc.enable()
    assert not cycles
    assert client.submit([2], GREEDY).result().outputs[0].finish_reason == "length"


def test_a_forked_process_has_to_make_its_own() -> None:
    """It neither waits for the engine, which it does not have, nor ends that of its parent."""
    client = a_long_client()
    with client.submit([1], replace(ENDLESS, max_tokens=3000)) as stream:
        child = os.fork()
        if not child:
            signal.alarm(int(HANG_S))
            try:
                client.submit([2], GREEDY)
            except EngineDeadError as error:
                stream.close()
                client.close()
                os._exit(0 if "make a new LLM here" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(stream.result().outputs[0].token_ids) == 3000


def test_an_error_keeps_nobody_from_being_collected() -> None:
    class Caller:
        def ask(self, client: EngineClient) -> None:
            client.submit([97], GREEDY)

    client, caller = make_client(), Caller()
    gone = weakref.ref(caller)
    gc.disable()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            caller.ask(client)
        del caught, caller
        assert gone() is None
    finally:
        gc.enable()


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
    assert core.scheduler.counts.num_running == 0
    assert client.submit([1], replace(GREEDY, max_tokens=max_tokens)).result().outputs[0].text == wanted
    client.close()


@pytest.mark.usefixtures("python_handler")
def test_an_interrupt_ends_what_the_caller_waits_for_alone() -> None:
    client = make_client(ScriptedBackend(context_length=4000, num_blocks=[1000]))
    other = client.submit([1], SamplingParams(temperature=0.0, max_tokens=60))
    stream = client.submit([2], SamplingParams(temperature=0.0))
    caller, is_waiting = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        assert is_waiting.wait(HANG_S)
        signal.pthread_kill(caller, signal.SIGINT)

    def wait() -> None:
        is_waiting.set()
        threading.Event().wait(HANG_S)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt), stream:
        wait()
    with pytest.raises(RealizarError, match="the request was closed"):
        stream.result()
    assert other.result().outputs[0].text == spelled(expected_tokens([1], (None,), GREEDY, 60))
    assert client.core.scheduler.counts.num_running == 0

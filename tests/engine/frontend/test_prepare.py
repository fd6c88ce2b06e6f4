"""Requests as callers make them: their seeds, and where the messages of a prompt end, for snapshots of states."""

from __future__ import annotations

from number_text import NumberText
from realizar.config import EngineConfig
from realizar.engine.frontend.prepare import prepare_request
from realizar.sampling_params import SamplingParams
from resolving import EngineClient, new_core
from scripted_backend import ScriptedBackend, make_spec

END = 96
PROMPT = (5, 6, END, 7, 8, 9, END, 95, 94)


def marks(prompt: tuple[int, ...], *, has_snapshots: bool = True) -> tuple[int, ...]:
    request = prepare_request(
        "a", prompt, SamplingParams(), vocab_size=97, max_request_tokens=99, end_ids={END, 3},
        has_snapshots=has_snapshots,
    )  # fmt: skip
    return request.prompt_marks


def test_messages_end_after_the_ids_that_end_answers() -> None:
    assert marks(PROMPT) == (3, 7)
    assert marks((1, 2)) == ()
    assert marks((END,)) == (1,)
    assert marks(PROMPT, has_snapshots=False) == ()


def test_a_prompt_of_many_ends_has_the_first_and_the_last() -> None:
    found = marks((END,) * 5000)
    assert len(found) == 1024
    assert found[:2] == (1, 5000 - 1022)
    assert found[-1] == 5000


def test_a_conversation_that_parts_from_another_starts_after_the_messages_of_both() -> None:
    backend = ScriptedBackend(num_snapshots=8)
    core = new_core(backend, make_spec((None,), has_state=True), EngineConfig(max_step_tokens=64))
    client = EngineClient(core, NumberText, (END,))
    system = (*range(30), END)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    first = client.submit((*system, 40, 41, END, 95), sampling).result()
    again = client.submit((*system, 50, 51, 52, 53, 54, END, 95), sampling).result()
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 28)  # blocks of 4 before the system's end at 31


def test_requests_that_name_no_seed_get_different_ones() -> None:
    made = [prepare_request("a", (1,), SamplingParams(), vocab_size=97, max_request_tokens=99) for _ in range(20)]
    assert len({request.sampling.seed for request in made} - {None}) == 20

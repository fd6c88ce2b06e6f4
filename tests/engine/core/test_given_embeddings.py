"""Embeddings that requests bring are what the ids' own would be: in any steps, and where a prefix is found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.core.late_service import LateService
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.operations import BoundProgram
from realizar.backends.cpu.runner import CPUBackend
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.row_grammars import Patience
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.spec import ModelSpec
from realizar.outputs import TokenLogprobs
from realizar.request import PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from reference_tensors import looked_up
from resolving import new_core, resolved
from scripted_backend import VOCAB_SIZE
from step_inputs import TokenOutput, stepped, with_given
from structured.grammar_engines import END

MODELS = {
    "plain": (Recipe(vocab_size=VOCAB_SIZE), 1.0),
    "scaled": (Recipe(vocab_size=VOCAB_SIZE), 4.0),
    "inputs of layers": (Recipe(vocab_size=VOCAB_SIZE, sources=(None, 0), windows=(None, None), input_size=32), 4.0),
    "hybrid": (Recipe(vocab_size=VOCAB_SIZE, windows=(None,) * 3, recurrent=("convolution", None, "delta")), 1.0),
}
LENGTHS = (1, 2, 33, 70, 100, 110)
RUNS = (((0, 1),), ((1, 2),), ((0, 32),), ((3, 40), (42, 70)), ((0, 100),), ((40, 41), (109, 110)))
COUNT = 12
Text = tuple[list[int], list[TokenLogprobs]]


@cache
def model(name: str) -> tuple[ModelSpec, Checkpoint]:
    recipe, scale = MODELS[name]
    spec, checkpoint = random_model(recipe)
    return replace(spec, embedding_scale=scale), checkpoint


def make_core(name: str, *, rows: int = 6, contexts: int = 6, **options: Any) -> EngineCore:
    """An engine with room for so many contexts of 128 tokens."""
    spec, checkpoint = model(name)
    tokens = contexts * 5 * 32
    config = EngineConfig(
        threads=1, context_length=128, max_running=rows, max_step_tokens=48, kv_cache_dtype="f16",
        kv_cache_bytes=sum(tokens * 4 * each.num_kv_heads * each.head_size for _, each in spec.attentions()),
    )  # fmt: skip
    backend = CPUBackend()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
    return new_core(backend, spec, config, **options)


def by_ids() -> list[Request]:
    requests = []
    for index, length in enumerate(LENGTHS):
        ids = tuple(random_tokens(Recipe(vocab_size=VOCAB_SIZE), length, index))
        sampling = SamplingParams(temperature=float(index % 2), seed=index, logprobs=2)
        requests.append(Request(f"r{index}", ids, sampling, COUNT, prompt_marks=(64,)))
    return requests


def by_embeddings(name: str) -> list[Request]:
    """The same, with ids under embeddings that matter only where layers have inputs of their own."""
    placeholder = None if model(name)[0].layer_inputs is not None else 5
    return [
        with_given(request, looked_up(*model(name), request.prompt_token_ids), runs, placeholder)
        for request, runs in zip(by_ids(), RUNS, strict=True)
    ]


def run(core: EngineCore, wanted: Sequence[Request]) -> tuple[dict[str, Text], dict[str, int]]:
    """Text and log-probabilities of each request, and the prompt's tokens that were found in the prefix cache."""
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for request in wanted:
        core.add(request)
    while core.has_work:
        for output in stepped(core):
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
        core.audit()
    texts = {
        name: ([i for each in found for i in each.token_ids], [i for each in found for i in each.logprobs])
        for name, found in outputs.items()
    }
    return texts, {name: found[0].num_cached_tokens for name, found in outputs.items()}


@cache
def alone(name: str) -> dict[str, Text]:
    """What each request gets by its ids, in an engine of one row."""
    core = make_core(name, rows=1)
    found = {key: text for each in by_ids() for key, text in run(core, [each])[0].items()}
    core.close()
    assert all(len(tokens) == COUNT for tokens, _ in found.values())
    return found


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_of_ids_give_the_bits_of_ids(name: str) -> None:
    """Alone, with prompts in chunks beside others' decodes, and from the blocks that the first time left."""
    core = make_core(name, steps_in_flight=2)
    again = [replace(each, request_id=f"{each.request_id} again") for each in by_embeddings(name)]
    texts, cached = run(core, by_embeddings(name))
    assert texts == alone(name)
    assert not any(cached.values())
    texts, cached = run(core, again)
    assert texts == {f"{key} again": text for key, text in alone(name).items()}
    assert [cached[f"r{index} again"] for index in (2, 3, 4, 5)] == [32, 64, 96, 96] or name == "hybrid"
    assert cached["r4 again"] >= 64
    core.close()


@pytest.mark.parametrize(("contexts", "failing"), [(2, 0), (6, 3)])
def test_requests_that_start_again_bring_their_embeddings_again(
    contexts: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are preempted for want of blocks, and in other rows, where the third step lacks memory."""
    walk, left = CPUBackend.walk, [failing]

    def fail(self: CPUBackend, program: BoundProgram) -> None:
        left[0] -= program is self.model.body
        if not left[0]:
            left[0] = -1
            raise CapacityError("no memory today")
        walk(self, program)

    monkeypatch.setattr(CPUBackend, "walk", fail)
    core = make_core("hybrid", contexts=contexts)
    assert run(core, by_embeddings("hybrid"))[0] == alone("hybrid")
    assert left[0] < 0
    assert core.scheduler.counts.num_preemptions > 0
    core.close()


def test_other_embeddings_under_the_same_ids_are_not_found() -> None:
    """Only blocks before the first that differs are, and nothing that ids alone have left."""
    spec, _ = model("scaled")
    (request,) = [each for each in by_ids() if each.request_id == "r4"]
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((100, spec.hidden_size)).astype(np.float32)
    others, last = embeddings.copy(), embeddings.copy()
    others[0, 0] += 1
    last[40] = -last[40]
    runs = [(0, 100)]
    wanted = [
        replace(with_given(request, values, cut, 5), request_id=name)
        for name, values, cut in (
            ("first", embeddings, runs), ("other", others, runs), ("last", last, runs), ("same", embeddings, runs),
            ("cut in two", embeddings, [(0, 7), (7, 100)]), ("moved", embeddings, [(1, 100)]),
        )
    ] + [replace(request, prompt_token_ids=(5,) * 100, request_id="ids")]  # fmt: skip
    core, cached, together = make_core("scaled"), {}, {}
    for each in wanted:
        texts, found = run(core, [each])
        together.update(texts)
        cached.update(found)
    core.close()
    assert cached == {"first": 0, "other": 0, "last": 32, "same": 96, "cut in two": 96, "moved": 0, "ids": 0}
    assert together["same"] == together["cut in two"] == together["first"]
    for each in wanted[1:3]:
        core = make_core("scaled")
        assert run(core, [each])[0][each.request_id] == together[each.request_id] != together["first"]
        core.close()


def test_a_held_row_reads_the_embedding_of_its_last_token_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask comes late, so that the step after it computes the prompt's last token anew."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    service = LateService()
    monkeypatch.setattr(service, "lateness", lambda row: 3)
    grammar = StructuredOutput("regex", "[a-z]{10,30}")
    wanted = [
        [replace(each, sampling=replace(each.sampling, structured=grammar, stop_token_ids=(END,))) for each in requests]
        for requests in (by_ids(), by_embeddings("scaled"))
    ]
    texts = []
    for requests in wanted:
        core = make_core("scaled", steps_in_flight=2, new_grammars=lambda: service)
        texts.append(run(core, requests)[0])
        core.close()
    service.end()
    assert texts[0] == texts[1]


def test_several_choices_share_a_prompt_of_embeddings() -> None:
    """Its blocks are computed once; each choice is what ids give it."""
    core = make_core("plain")
    pair = [
        replace(each[4], sampling=SamplingParams(n=3, seed=1), max_tokens=4)
        for each in (by_ids(), by_embeddings("plain"))
    ]
    texts = []
    for request in pair:
        choices: dict[int, list[int]] = defaultdict(list)
        core.add(request)
        while core.has_work:
            for output in stepped(core):
                choices[output.choice] += output.token_ids
        texts.append(choices)
    core.close()
    assert texts[0] == texts[1]
    assert core.scheduler.counts.prefix_cache_hits >= 2 * 2 * 96


def shortened(run: PromptEmbeddings) -> PromptEmbeddings:
    return replace(run, values=run.values[:-4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((prompt_embeddings(np.zeros((2, 8))),), "2 embeddings have 16 values; the model's have 256 each"),
        ((shortened(prompt_embeddings(np.zeros((1, 256)))),), "1 embeddings have 255 values"),
        ((prompt_embeddings(np.zeros((3, 256)), 8),), "given for tokens 8 to 10 of a prompt of 10"),
        ((prompt_embeddings(np.zeros((3, 256)), -1),), "given for tokens -1 to 1 of a prompt of 10"),
        (
            (prompt_embeddings(np.zeros((3, 256)), 2), prompt_embeddings(np.zeros((1, 256)), 4)),
            "two embeddings are given for token 4 of the prompt",
        ),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(given: tuple[PromptEmbeddings, ...], message: str) -> None:
    core = make_core("plain", rows=1)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        core.add(Request("a", (1,) * 10, SamplingParams(), 1, embeddings=given))
    assert caught.value.param == "prompt_embeds"
    assert not core.has_work
    core.close()


def test_positions_of_axes_fit_their_prompt() -> None:
    request = Request("a", (1,) * 10, SamplingParams(), 1, rope_positions=bytes(4 * 3 * 9))
    core = make_core("plain", rows=1)
    with pytest.raises(InvalidRequestError, match="positions of the rope's axes do not fit the prompt"):
        core.add(request)
    core.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, np.nan]], "embedding 0 is not finite"),
        ([[1.0, 1.0], [1e39, 0.0]], "embedding 1 is not finite"),
        ([1.0, 2.0], "not of shape \\(2,\\)"),
        (np.zeros((0, 4)), "not of shape \\(0, 4\\)"),
        ([[1.0], [1.0, 2.0]], "embeddings must be numbers \\[tokens, hidden_size\\]: "),
        ("text", "embeddings must be numbers \\[tokens, hidden_size\\]: "),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(values: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        prompt_embeddings(values)

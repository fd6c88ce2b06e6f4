"""Engines with grammars over a small vocabulary, and what each of their requests must get."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.prepare import prepare_request
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.scheduler.pace import Policy
from realizar.structured.grammar import GrammarFactory
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.service import GrammarService
from resolving import new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, choose, expected_tokens, history_states, make_spec
from step_inputs import TokenOutput, stepped
from structured.grammar_walks import allowed_ids, masks_of

END = 94
TOKENS = [bytes((0x20 + index,)) for index in range(END)] + [b"<end>", b"<control>"]
GRAMMARS = {
    "regex": (StructuredOutput("regex", "(ab|c){5,9}-[0-9]{3}"), "(ab|c){5,9}-[0-9]{3}"),
    "choice": (StructuredOutput("choice", '["abracadabra", "abracadabras"]'), "abracadabras?"),
    "schema": (
        StructuredOutput("json_schema", '{"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 5}'),
        r"\[([ \t]*(1|22|333)[ \t]*,?)*[ \t]*\]",
    ),
}


GRAMMAR_TOKENS = GrammarTokens(TOKENS, (95,), (END,), VOCAB_SIZE)
FACTORY = GrammarFactory(GRAMMAR_TOKENS)


def new_engine(backend: ScriptedBackend, new_grammars: Callable[[], GrammarService], **options: Any) -> EngineCore:
    """An engine; `options` are those of `new_core`, and `speculative_tokens`."""
    config = EngineConfig(
        max_running=1000, max_step_tokens=10_000, speculative_tokens=options.pop("speculative_tokens", 0)
    )
    policy = Policy(stretch=math.inf)  # else how much of a prompt is read depends on the clock
    spec = make_spec(backend.windows, has_state=backend.has_state)
    return new_core(backend, spec, config, new_grammars=new_grammars, policy=policy, **options)


def structured_request(name: str, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int = 60) -> Request:
    sampling = replace(sampling, max_tokens=max_tokens)
    return prepare_request(name, prompt, sampling, vocab_size=VOCAB_SIZE, max_request_tokens=256, end_ids=(END,))


def alone(
    request: Request, windows: Sequence[int | None] = (None,), num_ids: int = VOCAB_SIZE, *, has_state: bool = False
) -> list[int]:
    """The expected tokens of a request, computed from whole histories with one mask at a time."""
    assert request.sampling.structured is not None
    matcher = FACTORY.compile(request.sampling.structured).start()
    tokens = list(request.prompt_token_ids)
    while not matcher.ended and len(tokens) < request.num_prompt_tokens + request.max_tokens:
        allowed = np.zeros(VOCAB_SIZE, np.bool_)
        allowed[allowed_ids(masks_of(FACTORY, [(matcher, ())])[0][0])] = True
        if len(tokens) - request.num_prompt_tokens < request.sampling.min_tokens and allowed.sum() > 1:
            allowed[END] = False
        state = history_states(tokens, windows, has_state=has_state)[-1]
        chosen = choose(state, request.sampling, 0, allowed, num_ids)
        tokens.append(chosen)
        matcher.advance([chosen])
    return tokens[request.num_prompt_tokens :]


def run_out(core: EngineCore, disturb: Callable[[int], None] = lambda _step: None) -> dict[str, list[TokenOutput]]:
    """Run to the end; `disturb` is called before each step with its number."""
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    for number in range(5000):
        if not core.has_work:
            return outputs
        disturb(number)
        for output in stepped(core):
            outputs[output.request_id].append(output)
        core.audit()
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text_of(token_ids: Sequence[int]) -> str:
    assert token_ids[-1] == END
    return b"".join(TOKENS[token_id] for token_id in token_ids[:-1]).decode()


def mixed_requests() -> list[Request]:
    """Rows with every grammar, greedy and sampled, and rows without beside them."""
    rng = np.random.default_rng(3)
    requests = []
    for index in range(12):
        prompt = rng.integers(0, END, int(rng.integers(1, 14))).tolist()
        sampling = SamplingParams(temperature=float(index % 2), seed=index)
        if index % 4:
            structured, _ = list(GRAMMARS.values())[index % 3]
            requests.append(structured_request(f"grammar-{index}", prompt, replace(sampling, structured=structured)))
        else:
            requests.append(Request(f"plain-{index}", tuple(prompt), sampling, 20))
    return requests


def check_mixed(
    core: EngineCore,
    num_ids: int = VOCAB_SIZE,
    disturb: Callable[[int], None] = lambda _step: None,
    windows: Sequence[int | None] = (None,),
    *,
    has_state: bool = False,
) -> None:
    """Run mixed requests; each gets the tokens that it gets alone."""
    requests = mixed_requests()
    for request in requests:
        core.add(request)
    outputs = run_out(core, disturb)
    patterns = dict(GRAMMARS.values())
    for request in requests:
        found = tokens_of(outputs[request.request_id])
        if request.sampling.structured is None:
            prompt, sampling = request.prompt_token_ids, request.sampling
            assert found == expected_tokens(prompt, windows, sampling, 20, num_ids=num_ids, has_state=has_state)
        else:
            assert found == alone(request, windows, num_ids, has_state=has_state)
            assert re.fullmatch(patterns[request.sampling.structured], text_of(found))
            assert outputs[request.request_id][-1].finish_reason == "stop"
            assert outputs[request.request_id][-1].stop_token_id == END

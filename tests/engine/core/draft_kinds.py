"""Random requests with drafts of every kind, many of them right and many wrong, on any backend.

`DRAFT_REQUESTS` in the environment is the number of requests of each kind; 24 by default.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from backends.draft_models import assistant_head, dflash_head, eagle3_head, next_token_block, roughly
from grammar_services import LastingService
from random_models import Recipe, random_model
from realizar.backends.base import NO_OTHERS, Backend, ModelSource
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.models.mixers import GatedDeltaNet
from realizar.models.spec import Attention, ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from reference_tensors import load_tensor
from resolving import resolved
from step_inputs import TokenOutput, stepped
from structured.grammar_engines import END, GRAMMAR_TOKENS, GRAMMARS, structured_request

COUNT = int(os.environ.get("DRAFT_REQUESTS", "24"))
RECIPE = Recipe(
    hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=96, windows=(None,),
    weights="F32",
)  # fmt: skip
DEEP = replace(RECIPE, windows=(None, 40))
HYBRID = replace(RECIPE, windows=(None, None), recurrent=("delta",), value_size=16, lacking=("feed_forward",))
QUIET = replace(RECIPE, windows=(None, None, None), lacking=("feed_forward", "feed_forward"))
LENDING = replace(QUIET, windows=(40, None, None))
ECHO = replace(RECIPE, windows=(None, None, None), seed=2)
CONFIG = EngineConfig(
    threads=1, max_running=6, max_step_tokens=40, context_length=256, kv_cache_bytes=4 << 20, speculative_tokens=3,
    prompt_lookup_min=100, prompt_lookup_max=100,
)  # fmt: skip
LOOKUP: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 1}  # drafts wherever a token came before
KINDS: dict[str, tuple[Recipe, ModelSource | None, dict[str, Any]]] = {
    "lookup": (RECIPE, None, LOOKUP),
    "model": (DEEP, roughly(DEEP, 0.1), {}),
    "block": (RECIPE, next_token_block(RECIPE, of_state=0.06), {}),
    "lookup and block": (RECIPE, next_token_block(RECIPE, of_state=0.06), LOOKUP),
    "block of a hybrid": (HYBRID, next_token_block(HYBRID), {}),
    "dflash": (ECHO, dflash_head(ECHO, echoes=True), {}),
    "eagle3": (QUIET, eagle3_head(QUIET, of_state=0.01), {}),
    "assistant": (LENDING, assistant_head(LENDING, of_state=0.01), {}),
}
BLOCKS = 9  # room for one request of the whole context
Found = dict[tuple[str, int], list[Any]]


def model_of(recipe: Recipe) -> tuple[ModelSpec, Checkpoint]:
    """A random model whose recurrences add little, as no head of one layer foresees more, `QUIET` and `LENDING` all
    mixers.

    `ECHO` is one whose layers add little, and whose head is the embedding: a token mostly follows itself.
    """
    spec, checkpoint = random_model(recipe)
    tensors = dict(checkpoint.tensors)
    if recipe == ECHO:
        table = load_tensor(spec.tensors[spec.embedding], checkpoint)
        tensors[spec.head.weight] = replace(tensors[spec.head.weight], data=table.view(np.uint8))
    for part in [part for layer in spec.layers for part in (layer.mixer, layer.feed_forward)]:
        is_quiet = recipe == ECHO or (recipe in (QUIET, LENDING) and isinstance(part, Attention))
        if part is not None and (isinstance(part, GatedDeltaNet) or is_quiet):
            stored = tensors[part.linears()[-1].weight]
            quiet = np.array(stored.data).view(np.float32) * np.float32(0.05 if recipe != ECHO else 0.005)
            tensors[stored.name] = replace(stored, data=quiet.view(np.uint8))
    return spec, replace(checkpoint, tensors=tensors)


def random_sampling(rng: random.Random) -> SamplingParams:
    chosen: dict[str, Any] = {"seed": rng.randrange(1000), "temperature": rng.choice([0.0, 0.0, 0.0, 0.0, 0.1, 0.7])}
    choices: dict[str, list[Any]] = {
        "top_k": [5, 40], "top_p": [0.7, 0.95], "min_p": [0.05], "typical_p": [0.8], "top_n_sigma": [1.5],
        "repetition_penalty": [1.2], "presence_penalty": [0.4], "frequency_penalty": [0.3], "dry_multiplier": [0.8],
        "xtc_probability": [0.3], "mirostat": [2], "logit_bias": [{3: 2.0, 7: -4.0}], "logprobs": [0, 3],
        "prompt_logprobs": [1], "n": [2, 3], "stop_token_ids": [(5, 9, 11)], "min_tokens": [6],
    }  # fmt: skip
    for name in rng.sample(sorted(choices), rng.choice([0, 0, 1, 2, 3])):
        chosen[name] = rng.choice(choices[name])
    return SamplingParams(**chosen)


def random_requests(count: int) -> list[Request]:
    rng = random.Random(11)
    shared = [rng.randrange(END) for _ in range(100)]
    found = []
    for index in range(count):
        prompt = (*shared[: rng.choice([0, 0, 40, 100])], *(rng.randrange(END) for _ in range(rng.randrange(1, 30))))
        sampling = random_sampling(rng)
        if index % 6 == 5:
            structured, _ = rng.choice(list(GRAMMARS.values()))
            sampling = replace(sampling, structured=structured, stop_token_ids=(), n=1, min_tokens=0)
            found.append(structured_request(str(index), prompt, sampling))
        else:
            found.append(Request(str(index), tuple(prompt), sampling, rng.randrange(1, 110)))
    return found


def run(core: EngineCore, requests: list[Request]) -> tuple[Found, set[str]]:
    """Tokens with log-probabilities and ends, by choice, and the requests whose clients left before the end.

    Requests come in waves; the core is audited after every step.
    """
    rng, waiting, left = random.Random(5), list(requests), set()
    outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
    while core.has_work or waiting:
        for request in waiting[:3]:
            core.add(request)
        waiting = waiting[3:]
        for output in stepped(core):
            outputs[output.request_id, output.choice].append(output)
        core.audit()
        gone = rng.choice(requests).request_id
        if rng.random() < 0.02 and outputs[gone, 0]:
            core.abort(gone)
            left.add(gone)
    return {key: _read(each) for key, each in outputs.items()}, left


def _read(outputs: list[TokenOutput]) -> list[Any]:
    """One after another: each token with its log-probabilities, those of the prompt, and how the choice ended."""
    found: list[Any] = []
    for output in outputs:
        found += [("prompt", each) for each in output.prompt_logprobs]
        logprobs = list(output.logprobs) or [None] * len(output.token_ids)
        found += zip(output.token_ids, logprobs, strict=True)
        if output.finish_reason is not None:
            found.append((output.finish_reason, output.stop_token_id))
    return found


def predicted(requests: list[Request], found: Found) -> list[Request]:
    """Each with a prediction: its first choice's tokens, of which some are changed, some missing, and some added."""
    rng, changed = random.Random(3), []
    for request in requests:
        ids = [part[0] for part in found.get((request.request_id, 0), []) if isinstance(part[0], int)]
        for at in sorted(rng.sample(range(len(ids)), len(ids) // 8), reverse=True):
            ids[at : at + rng.randrange(2)] = [rng.randrange(END)] * rng.randrange(3)
        changed.append(replace(request, prediction=tuple(ids)))
    return changed


class DraftKinds:
    """Every kind of drafts on one backend; `fields` are of all configurations."""

    def __init__(self, new_backend: Callable[[], Backend], device: Device = "cpu", **fields: Any) -> None:
        self._new_backend, self._device, self._fields = new_backend, device, fields
        self._service = LastingService(replace(GRAMMAR_TOKENS, vocab_size=RECIPE.vocab_size))
        self._plain: dict[Recipe, tuple[Found, set[str]]] = {}

    def close(self) -> None:
        self._service.end()

    def plain(self, kind: str) -> tuple[Found, set[str]]:
        """What `COUNT` requests get without drafts; kinds of the same model share it."""
        recipe = KINDS[kind][0]
        if recipe not in self._plain:
            core = self._core(kind, drafts=False, measures=False)
            self._plain[recipe] = run(core, random_requests(COUNT))
            core.close()
        return self._plain[recipe]

    def check(self, kind: str, requests: list[Request], *, measures: bool = False) -> None:
        """Their tokens are those of `plain`, though many drafts are right and many wrong.

        With `measures` depths change as the engine measures them, 0 among them.
        """
        (expected, left_before), core = self.plain(kind), self._core(kind, drafts=True, measures=measures)
        found, left = run(core, requests)
        for key in expected.keys() | found.keys():
            one, other = expected.get(key, []), found.get(key, [])
            shared = min(len(one), len(other)) if key[0] in left | left_before else max(len(one), len(other))
            assert one[:shared] == other[:shared], key
        counts = core.scheduler.counts
        assert counts.num_preemptions > 0
        assert counts.prefix_cache_hits > 0
        taken = counts.accepted_tokens / counts.draft_tokens
        assert 0.3 <= taken <= 0.7
        core.close()

    def _core(self, kind: str, *, drafts: bool, measures: bool) -> EngineCore:
        recipe, drafter, fields = KINDS[kind]
        (spec, checkpoint), asked = model_of(recipe), replace(CONFIG, **self._fields)
        asked = replace(asked, **fields) if drafts else replace(asked, speculative_tokens=0)
        config = resolved(spec, checkpoint, asked, self._device)
        config, backend = replace(config, kv_blocks=(BLOCKS,) * len(spec.cache_groups())), self._new_backend()
        backend.load(spec, checkpoint, config, {"drafter": drafter} if drafts and drafter is not None else NO_OTHERS)
        policy = Policy(measures_drafts=measures)
        return EngineCore(backend, spec, config, new_grammars=lambda: self._service, policy=policy)

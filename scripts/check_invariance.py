r"""Requests of all kinds, each alone and then beside many others: their tokens and log-probabilities, bit for bit.

    python scripts/check_invariance.py --shape llama-1b --type q4_k_m --device cuda
    python scripts/check_invariance.py --model smollm2:135m --device cpu --requests 32 --prompt-tokens 1-60
    python scripts/check_invariance.py --model smollm2:135m --device cpu --requests 48 --prompt-tokens 1-40 \
        --output-tokens 40-100 --preempt 2

A model of a shape has random weights and Llama 3's vocabulary. Beside others means: in another order, with requests
between them that are aborted, with prompts that begin alike and share cached blocks, and where --preempt says so with
room in the KV cache for so few of the longest requests that some are preempted and computed again. Prints the first
difference of each request that has one, and what ran beside it; the exit status is then 1, and also where nothing was
preempted that should have been.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuda_serve import write_model

from realizar.backends.select import plan_memory, resolve_model
from realizar.bench.serve.kinds import KINDS, NEUTRAL, Expression, Fields, find_kind
from realizar.bench.serve.workload import Lengths
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.prepare import prepare_request
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import CapacityError, QueueFullError
from realizar.models.generated.shapes import SHAPES
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.step_deltas import StepDeltas

# Requests of all kinds for an engine itself: token ids and sampling parameters in place of texts and JSON.

_SHARED_TOKENS = (0, 0, 40, 300)  # that a prompt begins with, and others too
_MORE_LOGPROBS = (None, None, 0, 5)  # for the kinds that have none of their own


@dataclass(frozen=True, slots=True)
class Subject:
    """One request.

    Attributes:
        name: unique. kind: of `KINDS`.
        prompt: token ids.
        max_tokens: of its answer.
    """

    name: str
    kind: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SubjectWork:
    """Requests to draw.

    Attributes:
        vocab_size: of the model.
        prompt_tokens, output_tokens: lengths.
        kinds: their names; they come in turn.
        seed: of everything drawn.
    """

    vocab_size: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    kinds: Sequence[str] = tuple(KINDS)
    seed: int = 0


def draw_subject(work: SubjectWork, number: int) -> Subject:
    """The request of that number; its seed makes its choices, so that it has one answer.

    Some prompts begin alike. Half of the kinds without log-probabilities ask for some, which show what tokens hide.
    """
    rng = random.Random(f"{work.seed}/{number}")
    kind = find_kind(work.kinds[number % len(work.kinds)], "kinds")
    length, tokens = work.prompt_tokens.draw(rng), work.output_tokens.draw(rng)
    common = random.Random(work.seed)
    shared = [common.randrange(work.vocab_size) for _ in range(min(rng.choice(_SHARED_TOKENS), length - 1))]
    own = [rng.randrange(work.vocab_size) for _ in range(length - len(shared))]
    sampling = _to_sampling({**NEUTRAL, **kind.make(rng, tokens)}, rng, work.vocab_size)
    return Subject(f"{kind.name} {number}", kind.name, (*shared, *own), sampling, tokens)


def _to_sampling(fields: Fields, rng: random.Random, vocab_size: int) -> SamplingParams:
    """A kind's fields as parameters of an engine.

    Stop strings are left away, since text is made elsewhere. A call of a tool is an object with its name and arguments.
    """
    given: dict[str, Any] = {"logprobs": rng.choice(_MORE_LOGPROBS), "seed": rng.getrandbits(32), "ignore_eos": True}
    for name, value in fields.items():
        if name == "regex" and isinstance(value, Expression):
            given["structured"] = StructuredOutput("regex", value.regex)
        elif name == "json_schema":
            given["structured"] = StructuredOutput("json_schema", json.dumps(value))
        elif name == "tools":
            given["structured"] = StructuredOutput("json_schema", json.dumps(_call_schema(value)))
        elif name == "logit_bias":
            given[name] = {int(key) % vocab_size: bias for key, bias in value.items()}
        elif name not in ("stop", "tool_choice"):
            given[name] = value
    return SamplingParams(**given)


def _call_schema(tools: Sequence[Fields]) -> Fields:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": tool["function"]["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"anyOf": calls}


Log = Callable[[str], None]
_EXTRAS = 10**9  # numbers of the requests that are only there to be beside, and to leave


@dataclass(slots=True)
class SeenStep:
    """A step as its outputs show it.

    Attributes:
        kinds: of the choices that got tokens, and how many of each.
        num_unanswered: open requests without a token yet: their prompts are read, or wait.
    """

    kinds: Counter[str]
    num_unanswered: int


@dataclass(slots=True)
class SeenChoice:
    """One choice of a request.

    Attributes:
        tokens, logprobs: of the answer, in order.
        steps: the step of each token.
        end: the reason of its end.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)
    end: str = ""


Seen = dict[int, SeenChoice]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which a request's answer differs.

    Attributes:
        what: differs: the token, its log-probability, or the end.
        position: of the token in the answer.
        alone, beside: the two values.
        step: of the mixed load in which the token was made; None where no token was.
    """

    subject: Subject
    choice: int
    position: int
    what: str
    alone: str
    beside: str
    step: SeenStep | None

    def __str__(self) -> str:
        around = "" if self.step is None else f"; in its step {_describe(self.step)}"
        return (
            f"{self.subject.name}, prompt of {len(self.subject.prompt)}, choice {self.choice}, token {self.position}:"
            f" {self.what} {self.alone} alone, {self.beside} beside others{around}"
        )


@dataclass(frozen=True, slots=True)
class Crowd:
    """The load around the compared requests.

    Attributes:
        open_at_once: requests.
        leave_share: of all requests, those that are only beside, and are aborted before their end.
        seed: of the order, and of who leaves when.
    """

    open_at_once: int
    leave_share: float = 0.3
    seed: int = 0


def run_alone(core: EngineCore, subjects: Sequence[Subject], log: Log) -> dict[str, Seen]:
    """Each request by itself, from nothing: no other's blocks are found in the prefix cache."""
    found: dict[str, Seen] = {}
    for place, subject in enumerate(subjects):
        run = _Run(core, salt=f"alone {subject.name}")
        run.add(subject, None)
        while run.is_busy:
            run.step()
        found |= run.seen
        if (place + 1) % 100 == 0:
            log(f"{place + 1} of {len(subjects)} alone")
    return found


def run_beside(
    core: EngineCore, subjects: Sequence[Subject], work: SubjectWork, crowd: Crowd, log: Log
) -> dict[str, Seen]:
    """All requests in one load, in another order, where others come and go. Prompts that begin alike share blocks."""
    run = _Run(core, salt="beside")
    waiting = _with_extras(subjects, work, crowd)
    num_done = 0
    next_one = next(waiting, None)
    while next_one is not None or run.is_busy:
        while next_one is not None and run.num_open < crowd.open_at_once:
            if not run.add(*next_one):
                break
            next_one = next(waiting, None)
        run.step()
        if run.num_ended // 100 > num_done:
            num_done = run.num_ended // 100
            log(f"{run.num_ended} ended beside others")
    return {subject.name: run.seen[subject.name] for subject in subjects}


def _with_extras(subjects: Sequence[Subject], work: SubjectWork, crowd: Crowd) -> Iterator[tuple[Subject, int | None]]:
    """The subjects in a random order with others between them, each with the tokens after which it is aborted."""
    rng = random.Random(crowd.seed)
    number = _EXTRAS
    for subject in rng.sample(subjects, len(subjects)):
        while rng.random() < crowd.leave_share:
            number += 1
            extra = draw_subject(work, number)
            yield extra, rng.randint(0, extra.max_tokens)
        yield subject, None


class _Run:
    """Requests in an engine, and what their steps gave.

    Args:
        salt: requests of the run share cached blocks with each other alone.
    """

    def __init__(self, core: EngineCore, salt: str) -> None:
        self._core, self._salt = core, salt
        self._open: dict[str, tuple[Subject, int | None]] = {}
        self.seen: dict[str, Seen] = {}
        self._names: dict[int, tuple[str, int]] = {}  # request and choice, by number
        self.num_ended = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def add(self, subject: Subject, abort_after: int | None) -> bool:
        """Queue a request; False where it has to wait for another's end.

        Raises:
            QueueFullError: it has no room though nothing is open.
        """
        try:
            self._core.add(self._request(subject))
        except QueueFullError:
            if not self._open:
                raise
            return False
        self._open[subject.name] = subject, abort_after
        self.seen[subject.name] = {index: SeenChoice() for index in range(subject.sampling.n)}
        return True

    def step(self) -> None:
        """Run a step and take its outputs in.

        Raises:
            CapacityError: requests are open, and the engine has no work.
        """
        if not self._core.has_work:
            raise CapacityError(f"{len(self._open)} requests are open, and the engine has ended their work")
        step = SeenStep(Counter(), 0)
        self._take(self._core.step(), step)
        step.num_unanswered = sum(not self._num_tokens(name) for name in self._open)
        for name, (_, abort_after) in list(self._open.items()):
            if abort_after is not None and self._num_tokens(name) >= abort_after:
                self._core.abort(name)
                self._end(name)

    def _take(self, deltas: StepDeltas, step: SeenStep) -> None:
        self._names |= {start.number: (start.request_id, start.choice) for start in deltas.starts}
        for failure in deltas.failures:
            name, _ = self._names[failure.number]
            if name in self._open:
                for choice in self.seen[name].values():
                    choice.end = f"error: {failure.error.message}"
                self._end(name)
        for number, token_id in zip(deltas.number_list(), deltas.token_list(), strict=True):
            name, index = self._names[number]
            choice = self.seen[name][index]
            if name in self._open:
                choice.tokens.append(token_id)
                choice.steps.append(step)
        with_tokens = [self._names[number][0] for number in set(deltas.number_list())]
        step.kinds.update(self._open[name][0].kind for name in with_tokens if name in self._open)
        for part in deltas.logprobs:
            for number, entry in zip(part.number_list(), part.entries, strict=True):
                name, index = self._names[number]
                if name in self._open:
                    self.seen[name][index].logprobs.append(entry)
        for end in deltas.ends:
            name, index = self._names[end.number]
            if name in self._open:
                self.seen[name][index].end = end.finish_reason
                if all(each.end for each in self.seen[name].values()):
                    self._end(name)

    def _num_tokens(self, name: str) -> int:
        return sum(len(choice.tokens) for choice in self.seen[name].values())

    def _end(self, name: str) -> None:
        del self._open[name]
        self.num_ended += 1

    def _request(self, subject: Subject) -> Request:
        return prepare_request(
            subject.name,
            subject.prompt,
            replace(subject.sampling, max_tokens=subject.max_tokens),
            vocab_size=self._core.spec.vocab_size,
            max_request_tokens=len(subject.prompt) + subject.max_tokens,
            cache_salt=self._salt,
        )


def find_difference(subject: Subject, alone: Seen, beside: Seen) -> Difference | None:
    """The first difference of a request's answers, by its place in them; None if they are the same."""
    found = [
        difference
        for index in sorted(alone)
        if (difference := _of_choice(subject, index, alone[index], beside[index])) is not None
    ]
    return min(found, key=lambda difference: difference.position, default=None)


def _of_choice(subject: Subject, index: int, alone: SeenChoice, beside: SeenChoice) -> Difference | None:
    def differs(position: int, what: str, first: object, second: object) -> Difference:
        step = beside.steps[position] if position < len(beside.steps) else None
        return Difference(subject, index, position, what, str(first), str(second), step)

    shorter = min(len(alone.tokens), len(beside.tokens))
    for position in range(shorter):
        if alone.tokens[position] != beside.tokens[position]:
            return differs(position, "token", alone.tokens[position], beside.tokens[position])
        pair = alone.logprobs[position : position + 1], beside.logprobs[position : position + 1]
        if repr(pair[0]) != repr(pair[1]):  # exact for floats, and NaN equals itself
            return differs(position, "log-probability", *_unequal(*pair))
    if len(alone.tokens) != len(beside.tokens) or alone.end != beside.end:
        ends = [f"{choice.end or 'no end'} after {len(choice.tokens)} tokens" for choice in (alone, beside)]
        return differs(shorter, "end", *ends)
    return None


def _unequal(alone: Sequence[TokenLogprobs], beside: Sequence[TokenLogprobs]) -> tuple[str, str]:
    """The first numbers that differ: of the token itself, else of the top ones."""
    for first, second in zip(alone, beside, strict=False):
        pairs = [((first.token_id, first.logprob), (second.token_id, second.logprob))]
        for (id_, logprob), (other_id, other) in [*pairs, *zip(first.top, second.top, strict=False)]:
            if (id_, repr(logprob)) != (other_id, repr(other)):
                return f"{logprob!r} of id {id_}", f"{other!r} of id {other_id}"
    return repr(list(alone)), repr(list(beside))


def _describe(step: SeenStep) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in step.kinds.most_common())
    return f"{sum(step.kinds.values())} choices got tokens ({kinds}), {step.num_unanswered} requests had none yet"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="path or pulled name; without it, a model of --shape")
    parser.add_argument("--shape", default="llama-1b", choices=sorted(SHAPES))
    parser.add_argument("--type", default="q4_k_m", choices=("q4_k_m", "q8_0", "bf16", "f16"))
    parser.add_argument("--keep", type=Path, help="folder that keeps the model of a shape for the next run")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "f16", "bf16", "int8"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-batch-invariant", action="store_true", help="to see what differs without it")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--prompt-tokens", default="1-2000")
    parser.add_argument("--output-tokens", default="1-100")
    parser.add_argument("--open", type=int, default=64, help="requests open at once beside each other")
    parser.add_argument("--leave", type=float, default=0.3, help="share of requests that are only beside, and aborted")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument("--kv-cache-bytes", type=int)
    cache.add_argument("--preempt", type=int, help="a KV cache of so many of the longest requests")
    parser.add_argument("--max-step-tokens", type=int)
    parser.add_argument("--speculative-tokens", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=20, help="differences to print")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_core(arguments: argparse.Namespace, longest: int, folder: Path) -> EngineCore:
    """An engine for requests of `longest` tokens."""
    config = EngineConfig(
        device=arguments.device, batch_invariant=not arguments.no_batch_invariant, context_length=longest,
        kv_cache_dtype=arguments.kv_cache_dtype, kv_cache_bytes=arguments.kv_cache_bytes,
        max_step_tokens=arguments.max_step_tokens, speculative_tokens=arguments.speculative_tokens,
    )  # fmt: skip
    model = arguments.model
    if model is None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{arguments.shape}-{arguments.type}.gguf"
        if not path.is_file():
            partial = path.with_suffix(".partial")
            write_model(arguments.shape, partial, folder, arguments.type)
            partial.replace(path)
        model = str(path)
    checkpoint = find_checkpoint(model)
    if arguments.preempt is not None:
        spec, resolved = resolve_model(checkpoint, config)
        plan = plan_memory(spec, checkpoint, resolved)
        config = replace(config, kv_cache_bytes=math.ceil(arguments.preempt * longest * plan.kv_bytes_per_token))
    return load_core(checkpoint, config)


def check(core: EngineCore, arguments: argparse.Namespace, kinds: list[str]) -> tuple[list[Difference], int]:
    """Run all requests twice; their first differences, and how many sequences were preempted beside others."""

    def log(text: str) -> None:
        print(f"{time.perf_counter() - started_s:6.0f} s  {text}", file=sys.stderr, flush=True)

    started_s = time.perf_counter()
    work = SubjectWork(
        core.spec.vocab_size, Lengths.parse(arguments.prompt_tokens, "prompt-tokens"),
        Lengths.parse(arguments.output_tokens, "output-tokens"), kinds, arguments.seed,
    )  # fmt: skip
    subjects = [draw_subject(work, number) for number in range(arguments.requests)]
    alone = run_alone(core, subjects, log)
    before = core.scheduler.counts
    beside = run_beside(core, subjects, work, Crowd(arguments.open, arguments.leave, arguments.seed), log)
    after = core.scheduler.counts
    print(
        f"{arguments.requests} requests in {time.perf_counter() - started_s:.0f} s; beside others"
        f" {after.prefix_cache_hits - before.prefix_cache_hits} prompt tokens were cached,"
        f" {after.num_preemptions - before.num_preemptions} sequences preempted"
    )
    found = [find_difference(subject, alone[subject.name], beside[subject.name]) for subject in subjects]
    for kind in kinds:
        of_kind = [difference for subject, difference in zip(subjects, found, strict=True) if subject.kind == kind]
        same = sum(difference is None for difference in of_kind)
        print(f"{kind:>20} {same} of {len(of_kind)} the same")
    core.audit()
    differences = [difference for difference in found if difference is not None]
    return differences, after.num_preemptions - before.num_preemptions


def record(differences: list[Difference], arguments: argparse.Namespace) -> dict[str, object]:
    """Everything, for JSON."""
    return {
        "options": {name: str(value) for name, value in vars(arguments).items()},
        "requests": arguments.requests,
        "differences": [
            {"request": each.subject.name, "choice": each.choice, "position": each.position, "what": each.what,
             "text": str(each)}
            for each in differences
        ],
    }  # fmt: skip


def main() -> int:
    arguments = parse_arguments()
    kinds = [find_kind(name, "kinds").name for name in arguments.kinds.split(",")]
    longest = sum(Lengths.parse(getattr(arguments, name), name).high for name in ("prompt_tokens", "output_tokens"))
    with ExitStack() as ends:
        folder = arguments.keep or Path(ends.enter_context(tempfile.TemporaryDirectory()))
        core = make_core(arguments, longest + 1, folder)
        ends.callback(core.close)
        differences, num_preempted = check(core, arguments, kinds)
    for difference in differences[: arguments.show]:
        print(difference)
    counts = Counter(difference.what for difference in differences)
    print(f"{arguments.requests - len(differences)} of {arguments.requests} the same; differences: {dict(counts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record(differences, arguments), indent=1), encoding="utf-8")
    if arguments.preempt is not None and not num_preempted:
        print("nothing was preempted: more requests must be open, or the KV cache smaller")
        return 1
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())

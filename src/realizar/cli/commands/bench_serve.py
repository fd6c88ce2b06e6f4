"""`realizar bench-serve`: a load on OpenAI-compatible servers, timed; ours beside llama.cpp's in the same run."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from realizar.cli.options.arguments import Integer, MaybeInteger, at_least, check_folder, refuse_given
from realizar.cli.terminal.printable import report
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.bench.serve.client import Server
    from realizar.bench.serve.compare import ServerRuns
    from realizar.bench.serve.workload import LengthSource, Workload

_CONCURRENCY, _REQUESTS = 16, 64
_LEAVE = 0.25
_CONTEXT, _MIX_CONTEXT = 2048, 8192
_TEMPLATE_TOKENS = 64
# Of each protocol: the requests, and the tokens of a prompt and of an answer, where the options leave them open.
_PROTOCOLS = {"sglang": (1000, 1024, 1024), "vllm": (1000, 1024, 128)}


@Parameter(name="*", group="Load", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        requests: requests in a round; default 64, with a protocol 1,000.
        seconds: time of a round, in place of a number of requests.
        rate: mean arrivals per second, at random times (Poisson); inf has all arrive at the start.
        concurrency: requests open at a time; several are loads in turn. Default 16, and no limit with --rate.
        prompt_words: words of a prompt, about a token each: 128 (the default), or 64-256.
        output_tokens: tokens of an answer: 64 (the default), or 32-128.
        shared_words: words that all prompts start with.
        chat: send chats instead of completions.
        temperature: temperature of every request; default 0.
        ignore_eos: ask for answers of full length.
        leave: share of clients that leave before their answer is complete; default 0, of a mix 0.25.
        rounds: times that every server gets the load, in turn.
        warmup: requests sent first and not counted; every kind is sent once in any case.
        seed: of everything that is drawn.
        timeout_s: seconds that an answer may take.
        generators: processes that send the requests; default one for each four cores.
    """

    requests: Annotated[MaybeInteger, Parameter(name=("--requests", "--num-prompts"))] = None
    seconds: float | None = None
    rate: Annotated[float | None, Parameter(name=("--rate", "--request-rate"))] = None
    concurrency: Annotated[
        tuple[Integer, ...], Parameter(name=("--concurrency", "--max-concurrency"), consume_multiple=True)
    ] = ()
    prompt_words: str | None = None
    output_tokens: str | None = None
    shared_words: Integer = 0
    chat: bool = False
    temperature: float | None = None
    ignore_eos: Annotated[bool, Parameter(negative="--no-ignore-eos")] = True
    leave: float | None = None
    rounds: Integer = 1
    warmup: Integer = 2
    seed: Integer = 0
    timeout_s: float = 600.0
    generators: MaybeInteger = None

    def check(self) -> None:
        """Check, before long work, what the load itself does not. InvalidRequestError: a number is out of range."""
        at_least(1, "rounds", self.rounds)
        if not self.timeout_s > 0:
            raise InvalidRequestError(f"--timeout-s must be above 0, not {self.timeout_s:g}", "timeout-s")


@Parameter(name="*", group="Protocol", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolOptions:
    """Options of a load as in SGLang's bench_serving or vLLM's bench serve, with --dataset-name random.

    Attributes:
        protocol: whose; prompts are random token ids, all requests arrive at once, --max-concurrency open at a time.
        random_input_len: tokens of a prompt; default 1,024.
        random_output_len: tokens of an answer; default 1,024 for sglang, 128 for vllm.
        random_range_ratio: sglang draws lengths from that share of them on (1 is fixed), vllm around (0 is fixed).
    """

    protocol: Literal["sglang", "vllm"] | None = None
    random_input_len: Annotated[MaybeInteger, Parameter(name=("--random-input-len", "--random-input"))] = None
    random_output_len: Annotated[MaybeInteger, Parameter(name=("--random-output-len", "--random-output"))] = None
    random_range_ratio: float | None = None

    def lengths(self) -> tuple[LengthSource, LengthSource] | None:
        """Tokens of a prompt and of an answer; None without a protocol.

        It raises InvalidRequestError if a value is out of range, or there is no protocol that it could be for.
        """
        from realizar.bench.serve.workload import Lengths

        options = ("random_input_len", "random_output_len", "random_range_ratio")
        if self.protocol is None:
            refuse_given(self, options, "needs --protocol sglang or vllm")
            return None
        given = (self.random_input_len, self.random_output_len)
        defaults = _PROTOCOLS[self.protocol][1:]
        lengths = [default if length is None else length for length, default in zip(given, defaults, strict=True)]
        for name, length in zip(options, lengths, strict=False):
            at_least(1, name.replace("_", "-"), length)
        prompt, answer = (Lengths.around(each, self.random_range_ratio or 0.0, self.protocol) for each in lengths)
        return prompt, answer


@Parameter(name="*", group="Mix", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class MixOptions:
    """Options of a load of mixed kinds; each of them asks for one.

    Attributes:
        mix: send kinds of requests mixed, of lengths as in a published trace, unless lengths are given.
        mix_weights: weights of kinds: greedy=2 json-schema=1; other kinds are then not sent.
        kind: send these kinds in turn, each alone; mix stands for all of them mixed.
    """

    mix: bool = False
    mix_weights: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    kind: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()

    def weights(self) -> dict[str, dict[str, float]]:
        """The weights of kinds of each load, by its label; empty without a mix.

        It raises InvalidRequestError if a kind is not known, or options exclude each other.
        """
        from realizar.bench.serve.compare import MIX
        from realizar.bench.serve.kinds import find_kind, parse_weights

        if not self.kind:
            wanted = self.mix or self.mix_weights
            return {MIX: parse_weights(self.mix_weights, "mix-weights")} if wanted else {}
        if self.mix or self.mix_weights:
            raise InvalidRequestError("--kind sends kinds in turn, --mix sends them mixed: give one of them", "kind")
        return {
            name: parse_weights((), "kind") if name == MIX else {find_kind(name, "kind").name: 1.0}
            for name in self.kind
        }


@Parameter(name="*", group="Servers", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the servers to load.

    Attributes:
        url: server to load; without it, realizar serves --model-file.
        peer_url: server to load in turn; repeatable.
        model: model that requests name; default the server's first.
        api_key: key of the server at --url.
        model_file: model to serve, as `realizar serve` takes it.
        llama_server: llama.cpp's server, to load in turn.
        parallel: requests at a time of started servers; default as many as are open, 16 at least.
        context_length: tokens per request of started servers, or of one that does not say; default what requests need.
        threads: CPU threads of started servers; default their own.
        api_processes: API processes of the server of --model-file; default its own.
        replicas: replicas of the server of --model-file.
    """

    url: str | None = None
    peer_url: tuple[str, ...] = ()
    model: str | None = None
    api_key: str | None = None
    model_file: str | None = None
    llama_server: Path | None = None
    parallel: MaybeInteger = None
    context_length: MaybeInteger = None
    threads: Annotated[MaybeInteger, Parameter(name=("--threads", "-t"))] = None
    api_processes: MaybeInteger = None
    replicas: Integer = 1

    def check(self) -> None:
        """Check what servers would refuse late. It raises InvalidRequestError if a number is out of range."""
        for name in ("parallel", "context_length", "api_processes", "replicas"):
            if (value := getattr(self, name)) is not None:
                at_least(1, name.replace("_", "-"), value)


_SERVERS, _LOAD, _PROTOCOL, _NO_MIX = ServerOptions(), LoadOptions(), ProtocolOptions(), MixOptions()


def bench_serve_command(
    *,
    servers: ServerOptions = _SERVERS,
    load: LoadOptions = _LOAD,
    protocol: ProtocolOptions = _PROTOCOL,
    mixed: MixOptions = _NO_MIX,
    goodput: Annotated[
        tuple[str, ...],
        Parameter(consume_multiple=True, negative=(), help="Objectives in ms: ttft:500 tpot:50 e2el:9000."),
    ] = (),
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write all figures to this file.")] = None,
    picture: Annotated[Path | None, Parameter(help="Write the latency picture, SVG, to this file.")] = None,
    compare: Annotated[
        tuple[Path, ...],
        Parameter(consume_multiple=True, negative=(), help="Load nothing: compare two files of --json."),
    ] = (),
) -> None:
    """Measure a server under load: time to first text, between texts, throughput, goodput."""
    from realizar.bench.serve.compare import compare_servers
    from realizar.bench.serve.figures import parse_objectives
    from realizar.bench.serve.load import Generators, default_generators
    from realizar.bench.serve.noise import compare_saved
    from realizar.bench.serve.report import as_markdown, as_record

    if compare:
        if len(compare) != 2:
            raise InvalidRequestError("--compare takes two files of bench-serve --json", "compare")
        print(compare_saved(*compare))
        return
    servers.check()
    load.check()
    check_folder(json_file)
    check_folder(picture)
    loads, objectives = _loads(load, protocol, mixed), parse_objectives(goodput)
    count = default_generators() if load.generators is None else load.generators
    with Generators(count) as generators, _running(servers, list(loads.values()), mixed) as running:
        results = compare_servers(
            running, loads, generators, rounds=load.rounds, warmup=load.warmup, timeout_s=load.timeout_s, log=report
        )
    print(as_markdown(results, objectives))
    if json_file is not None:
        work = asdict(next(iter(loads.values()))) | {"concurrency": load.concurrency or None}
        rest = {"loads": list(loads), "rounds": load.rounds, "generators": count, "objectives_ms": objectives}
        record = as_record(results, {**work, "protocol": protocol.protocol, **rest}, objectives)
        json_file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if picture is not None:
        _write_picture(picture, results)
    if any(all(each.error is not None for run in result.all_runs for each in run.answers) for result in results):
        raise InvalidRequestError("a server completed no request", "url")


def _loads(load: LoadOptions, protocol: ProtocolOptions, mixed: MixOptions) -> dict[str, Workload]:
    """The loads that the options ask for, by label.

    It raises InvalidRequestError if a value is out of range, or options exclude each other.
    """
    from realizar.bench.serve.workload import TRACE_ANSWERS, TRACE_PROMPTS, Lengths, Workload

    weights, random_lengths = mixed.weights(), protocol.lengths()
    words, tokens = load.prompt_words, load.output_tokens
    if random_lengths is not None:
        for name, value in (("--mix or --kind", weights), ("--prompt-words", words), ("--output-tokens", tokens)):
            if value:
                raise InvalidRequestError(f"--protocol does not go with {name}", "protocol")
    if weights and load.temperature is not None:
        raise InvalidRequestError("--temperature does not go with --mix or --kind", "temperature")
    is_plain = not weights
    requests = load.requests
    if requests is None:
        requests = _PROTOCOLS[protocol.protocol][0] if protocol.protocol else _REQUESTS
    lengths: tuple[LengthSource, LengthSource] = random_lengths or (
        Lengths.parse(words or "128", "prompt-words") if words or is_plain else TRACE_PROMPTS,
        Lengths.parse(tokens or "64", "output-tokens") if tokens or is_plain else TRACE_ANSWERS,
    )
    leave = load.leave if load.leave is not None else _LEAVE if mixed.mix or mixed.mix_weights else 0.0
    base = Workload(
        weights={"temperature" if load.temperature else "greedy": 1.0},
        fields={"temperature": load.temperature} if load.temperature else {},
        num_requests=requests if load.seconds is None else None,
        seconds=load.seconds,
        prompt_length=lengths[0],
        output_tokens=lengths[1],
        rate_per_s=None if load.rate == math.inf else load.rate,
        concurrency=_CONCURRENCY if load.rate is None and protocol.protocol is None else None,
        leave_share=leave,
        exact=is_plain,
        shared_words=load.shared_words,
        token_ids=random_lengths is not None,
        ignore_eos=load.ignore_eos,
        chat=load.chat,
        seed=load.seed,
    )
    loads = {label: replace(base, weights=each) for label, each in weights.items()} or {"plain": base}
    if len(load.concurrency) < 2:
        most_open = load.concurrency[0] if load.concurrency else base.concurrency
        return {label: replace(work, concurrency=most_open) for label, work in loads.items()}
    return {
        f"{label}, {most_open} open" if weights else f"{most_open} open": replace(work, concurrency=most_open)
        for most_open in load.concurrency
        for label, work in loads.items()
    }


@contextmanager
def _running(servers: ServerOptions, loads: Sequence[Workload], mixed: MixOptions) -> Iterator[list[Server]]:
    """The servers to load; those that had to be started are stopped at the end of the block."""
    from realizar.bench.serve.client import Server
    from realizar.bench.serve.process import ServerSize, llama_server, realizar_server
    from realizar.bench.serve.servers import find_server
    from realizar.hub.pull import resolve

    model_file, program, model = servers.model_file, servers.llama_server, servers.model or ""
    if not servers.url and model_file is None:
        raise InvalidRequestError("name a server with --url, or a model to serve with --model-file", "url")
    if program is not None and model_file is None:
        raise InvalidRequestError("--llama-server needs --model-file", "model-file")
    most_open = max((work.concurrency or 0 for work in loads), default=0)
    context_length = servers.context_length
    if context_length is None:
        longest = max(_longest(work.prompt_length) + _longest(work.output_tokens) for work in loads)
        context_length = _MIX_CONTEXT if mixed.weights() else max(_CONTEXT, longest + _TEMPLATE_TOKENS)
    size = ServerSize(
        servers.parallel or max(_CONCURRENCY, most_open),
        context_length,
        servers.threads,
        api_processes=servers.api_processes,
        replicas=servers.replicas,
    )
    with ExitStack() as running:
        running.enter_context(_unwinding_on_termination())
        # The key and the model's name are those of the server at --url.
        if servers.url:
            found = [Server(servers.url, servers.url, model, servers.api_key)]
        else:
            report(f"starting realizar serve {model_file}")
            found = [Server("realizar", running.enter_context(realizar_server(str(model_file), size)), model)]
        if program is not None and model_file is not None:
            report(f"starting {program.name}")
            url = running.enter_context(llama_server(program, resolve(model_file), size))
            found.append(Server("llama.cpp", url, ""))
        found += [Server(url, url, "") for url in servers.peer_url]
        yield [find_server(replace(each, context_tokens=context_length)) for each in found]


def _longest(lengths: LengthSource) -> int:
    from realizar.bench.serve.workload import Quantiles

    return lengths.points[-1][1] if isinstance(lengths, Quantiles) else lengths.high


@contextmanager
def _unwinding_on_termination() -> Iterator[None]:
    """Turn SIGTERM into an exception inside the block, so that started servers are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_picture(path: Path, results: Sequence[ServerRuns]) -> None:
    from realizar.bench.serve.report import latency_svg

    curves = [
        (result.server.name if len(result.runs) == 1 else f"{result.server.name}, {label}", answers)
        for result in results
        for label, runs in result.runs.items()
        for answers in [[each for run in runs for each in run.answers]]
    ]
    path.write_text(latency_svg(curves, f"{results[0].server.model}: share of all in percent"), encoding="utf-8")

"""`realizar bench-serve`: a load on OpenAI-compatible servers, timed; ours beside llama.cpp's in the same run."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from realizar.cli.commands.bench_serve_mix import load_mixed, make_mix_work
from realizar.cli.options.arguments import Integer, MaybeInteger, check_folder
from realizar.cli.options.load import LoadOptions
from realizar.cli.options.mix import MixOptions
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.bench.serve_client import Target
    from realizar.bench.serve_process import ServerSize
    from realizar.bench.serve_report import Summary
    from realizar.bench.serve_run import LoadRun
    from realizar.bench.serve_workload import Workload


_CONTEXTS = {False: 2048, True: 8192}  # of started servers, without and with a mix
_LOAD, _NO_MIX = LoadOptions(), MixOptions()
_Context = Annotated[
    MaybeInteger,
    Parameter(
        help="Tokens per request of started servers, or of one that does not say; default 2,048, for a mix 8,192."
    ),
]
_Threads = Annotated[
    MaybeInteger, Parameter(name=("--threads", "-t"), help="CPU threads of started servers; default their own.")
]

_Goodput = Annotated[
    tuple[str, ...],
    Parameter(consume_multiple=True, negative=(), help="Objectives in ms: ttft:500 tpot:50 e2e:9000."),
]


def bench_serve_command(
    *,
    url: Annotated[str | None, Parameter(help="Server to load; without it, realizar serves --model-file.")] = None,
    peer_url: Annotated[tuple[str, ...], Parameter(negative=(), help="Server to load in turn; repeatable.")] = (),
    model: Annotated[str | None, Parameter(help="Model that requests name; default the server's first.")] = None,
    api_key: Annotated[str | None, Parameter(help="Key of the server at --url.")] = None,
    model_file: Annotated[str | None, Parameter(help="Model to serve, as `realizar serve` takes it.")] = None,
    llama_server: Annotated[Path | None, Parameter(help="llama.cpp's server, to load in turn.")] = None,
    parallel: Annotated[Integer, Parameter(help="Requests at a time of started servers.")] = 16,
    context_length: _Context = None,
    threads: _Threads = None,
    api_processes: Annotated[Integer, Parameter(help="API processes of the server of --model-file.")] = 1,
    replicas: Annotated[Integer, Parameter(help="Replicas of the server of --model-file.")] = 1,
    temperature: Annotated[float | None, Parameter(help="Temperature of every request; default 0.")] = None,
    goodput: _Goodput = (),
    warmup: Annotated[Integer, Parameter(help="Requests sent first and not counted.")] = 2,
    picture: Annotated[Path | None, Parameter(help="Write the latency picture, SVG, to this file.")] = None,
    load: LoadOptions = _LOAD,
    mixed: MixOptions = _NO_MIX,
) -> None:
    """Measure a server under load: time to first text, between texts, throughput, goodput."""
    from realizar.bench.serve_client import Target
    from realizar.bench.serve_process import ServerSize
    from realizar.bench.serve_report import parse_objectives

    context_length = context_length if context_length is not None else _CONTEXTS[mixed.is_wanted]
    _check_counts(
        ("context-length", context_length),
        ("parallel", parallel),
        ("api-processes", api_processes),
        ("replicas", replicas),
    )
    load.check()
    check_folder(picture)
    size = ServerSize(parallel, context_length, threads, api_processes=api_processes, replicas=replicas)
    asked = Target("", url or "", model or "", api_key, load.chat)
    if mixed.is_wanted:
        _refuse_in_mixes(("goodput", goodput), ("temperature", temperature), ("picture", picture))
        mix = make_mix_work(load, mixed)
        with _running(asked, peer_url, model_file, llama_server, size) as targets:
            load_mixed(targets, mix, load, mixed, context_length, _report)
        return
    mixed.check()
    objectives, work = parse_objectives(goodput), _workload(load)
    extra: dict[str, object] = {"temperature": temperature or 0.0, **({"ignore_eos": True} if load.ignore_eos else {})}
    with _running(replace(asked, extra=extra), peer_url, model_file, llama_server, size) as targets:
        _load_plainly(targets, work, load, objectives, warmup, picture)


def _workload(load: LoadOptions) -> Workload:
    from realizar.bench.serve_workload import Lengths, Workload

    return Workload(
        num_requests=load.requests,
        prompt_words=Lengths.parse(load.prompt_words or "128", "prompt-words"),
        output_tokens=Lengths.parse(load.output_tokens or "64", "output-tokens"),
        rate_per_s=load.rate,
        concurrency=load.open_at_once,
        shared_words=load.shared_words,
        seed=load.seed,
    )


def _load_plainly(
    targets: list[Target],
    work: Workload,
    load: LoadOptions,
    objectives: dict[str, float],
    warmup: int,
    picture: Path | None,
) -> None:
    """Load servers with requests of one kind, print the report and write the figures.

    Raises:
        InvalidRequestError: a server completed no request.
    """
    from realizar.bench.serve_compare import compare_servers
    from realizar.bench.serve_report import as_markdown, read_replicas, replicas_as_markdown, summarize

    before = [read_replicas(target) for target in targets]
    runs = compare_servers(targets, work, rounds=load.rounds, warmup=warmup, timeout_s=load.timeout_s, log=_report)
    summaries = [summarize(run, objectives) for run in runs]
    print(as_markdown(summaries))
    if replicas := replicas_as_markdown(targets, before, [read_replicas(target) for target in targets]):
        print(f"\n{replicas}")
    rest = {"rounds": load.rounds, "chat": load.chat, "objectives_ms": objectives}
    _write_record(load.json_file, runs, summaries, work, rest)
    _write_picture(picture, runs, work)
    if any(summary.num_failed == summary.num_requests for summary in summaries):
        raise InvalidRequestError("a server completed no request", "url")


def _refuse_in_mixes(*options: tuple[str, object]) -> None:
    """Refuse options that a load of kinds has no use for."""
    for name, value in options:
        if value is not None and value != ():
            raise InvalidRequestError(f"--{name} does not go with --mix or --kind", name)


def _check_counts(*counts: tuple[str, int]) -> None:
    """Refuse a count below 1 under the name of its option."""
    for name, value in counts:
        if value < 1:
            raise InvalidRequestError(f"--{name} must be at least 1, not {value}", name)


def _write_record(
    path: Path | None, runs: list[LoadRun], summaries: list[Summary], work: Workload, rest: dict[str, object]
) -> None:
    """Write all figures as JSON, if a path is given; `rest` is what the load has beside the workload."""
    from realizar.bench.serve_report import as_record

    if path is None:
        return
    record = as_record(runs, summaries, {**asdict(work), **rest})
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _write_picture(path: Path | None, runs: list[LoadRun], work: Workload) -> None:
    """Write the latency picture, if a path is given."""
    from realizar.bench.serve_picture import latency_svg

    if path is not None:
        path.write_text(latency_svg(runs, _title(runs, work)), encoding="utf-8")


@contextmanager
def _running(
    asked: Target, peer_urls: tuple[str, ...], model_file: str | None, llama_program: Path | None, size: ServerSize
) -> Iterator[list[Target]]:
    """The servers to load; those that had to be started are stopped at the end of the block.

    Args:
        asked: the given address, model and key; missing ones are empty.
        peer_urls: further servers, asked for their first models, without the key of the other.
    """
    from realizar.bench.serve_compare import first_model

    with ExitStack() as running:
        running.enter_context(_unwinding_on_termination())
        targets = _start(running, asked, model_file, llama_program, size)
        for url in peer_urls:
            targets.append(replace(asked, name=url, url=url, model=first_model(url, None), api_key=None))
        yield targets


def _start(
    running: ExitStack, asked: Target, model_file: str | None, llama_program: Path | None, size: ServerSize
) -> list[Target]:
    """Start the servers to load; `running` stops them."""
    from realizar.bench.serve_compare import first_model
    from realizar.bench.serve_process import llama_server, realizar_server
    from realizar.hub.pull import resolve

    if not asked.url and model_file is None:
        raise InvalidRequestError("name a server with --url, or a model to serve with --model-file", "url")
    if llama_program is not None and model_file is None:
        raise InvalidRequestError("--llama-server needs --model-file", "model-file")
    ours = replace(asked, name=asked.url)
    if not asked.url and model_file is not None:
        _report(f"starting realizar serve {model_file}")
        ours = replace(asked, name="realizar", url=running.enter_context(realizar_server(model_file, size)))
    if not ours.model:
        ours = replace(ours, model=first_model(ours.url, ours.api_key))
    if llama_program is None or model_file is None:
        return [ours]
    _report(f"starting {llama_program.name}")
    address = running.enter_context(llama_server(llama_program, resolve(model_file), size))
    return [ours, replace(asked, name="llama.cpp", url=address, model=first_model(address, None), api_key=None)]


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


def _title(runs: list[LoadRun], work: Workload) -> str:
    if work.rate_per_s is not None:
        how = f"{work.rate_per_s:g} requests/s, random arrivals"
    else:
        how = f"{work.concurrency} requests at a time"
    return f"{runs[0].target.model}: {how}, share of all in percent"


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

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

from realizar.cli.options.arguments import Integer, MaybeInteger, check_folder
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.bench.serve_client import Target
    from realizar.bench.serve_process import ServerSize
    from realizar.bench.serve_report import Summary
    from realizar.bench.serve_run import LoadRun
    from realizar.bench.serve_workload import Workload


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
    model: Annotated[str | None, Parameter(help="Model that requests name; default the server's first.")] = None,
    api_key: Annotated[str | None, Parameter(help="Key of the server at --url.")] = None,
    model_file: Annotated[str | None, Parameter(help="Model to serve, as `realizar serve` takes it.")] = None,
    llama_server: Annotated[Path | None, Parameter(help="llama.cpp's server, to load in turn.")] = None,
    parallel: Annotated[MaybeInteger, Parameter(help="Requests at a time of started servers; default 16.")] = None,
    context_length: Annotated[Integer, Parameter(help="Tokens per request of started servers.")] = 2048,
    threads: _Threads = None,
    requests: Annotated[Integer, Parameter(help="Requests in a round.")] = 64,
    rate: Annotated[float | None, Parameter(help="Mean arrivals per second, at random times (open loop).")] = None,
    concurrency: Annotated[MaybeInteger, Parameter(help="Requests open at a time (closed loop).")] = None,
    prompt_words: Annotated[str, Parameter(help="Words of a prompt, about a token each: 128, or 64-256.")] = "128",
    output_tokens: Annotated[str, Parameter(help="Tokens of an answer: 64, or 32-128.")] = "64",
    shared_words: Annotated[Integer, Parameter(help="Words that all prompts start with.")] = 0,
    chat: Annotated[bool, Parameter(negative=(), help="Send chats instead of completions.")] = False,
    ignore_eos: Annotated[bool, Parameter(help="Ask for answers of full length.")] = True,
    temperature: float = 0.0,
    goodput: _Goodput = (),
    rounds: Annotated[Integer, Parameter(help="Times that every server gets the load, in turn.")] = 1,
    warmup: Annotated[Integer, Parameter(help="Requests sent first and not counted.")] = 2,
    seed: Integer = 0,
    timeout_s: Annotated[float, Parameter(help="Seconds that an answer may take.")] = 600.0,
    json_file: Annotated[Path | None, Parameter(name="--json", help="Write all figures to this file.")] = None,
    picture: Annotated[Path | None, Parameter(help="Write the latency picture, SVG, to this file.")] = None,
) -> None:
    """Measure a server under load: time to first text, between texts, throughput, goodput."""
    from realizar.bench.serve_client import Target
    from realizar.bench.serve_compare import compare_servers
    from realizar.bench.serve_process import ServerSize
    from realizar.bench.serve_report import as_markdown, parse_objectives, summarize
    from realizar.bench.serve_workload import Lengths, Workload

    _check_numbers(timeout_s, ("rounds", rounds), ("context-length", context_length), ("parallel", parallel or 16))
    check_folder(json_file)
    check_folder(picture)
    objectives = parse_objectives(goodput)
    work = Workload(
        num_requests=requests,
        prompt_words=Lengths.parse(prompt_words, "prompt-words"),
        output_tokens=Lengths.parse(output_tokens, "output-tokens"),
        rate_per_s=rate,
        concurrency=concurrency if concurrency is not None or rate is not None else 16,
        shared_words=shared_words,
        seed=seed,
    )
    extra: dict[str, object] = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    size = ServerSize(parallel or 16, context_length, threads)
    asked = Target("", url or "", model or "", api_key, chat, extra)
    with ExitStack() as running:
        running.enter_context(_unwinding_on_termination())
        targets = _start(running, asked, model_file, llama_server, size)
        runs = compare_servers(targets, work, rounds=rounds, warmup=warmup, timeout_s=timeout_s, log=_report)
    summaries = [summarize(run, objectives) for run in runs]
    print(as_markdown(summaries))
    _write_record(json_file, runs, summaries, work, {"rounds": rounds, "chat": chat, "objectives_ms": objectives})
    _write_picture(picture, runs, work)
    if any(summary.num_failed == summary.num_requests for summary in summaries):
        raise InvalidRequestError("a server completed no request", "url")


def _check_numbers(timeout_s: float, *counts: tuple[str, int]) -> None:
    """Refuse a time that is not above 0, and a count below 1 under the name of its option."""
    for name, value in counts:
        if value < 1:
            raise InvalidRequestError(f"--{name} must be at least 1, not {value}", name)
    if not timeout_s > 0:
        raise InvalidRequestError(f"--timeout-s must be above 0, not {timeout_s:g}", "timeout-s")


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


def _start(
    running: ExitStack, asked: Target, model_file: str | None, llama_program: Path | None, size: ServerSize
) -> list[Target]:
    """Start the servers to load; `running` stops them.

    Args:
        asked: the given address, model and key; missing ones are empty.
    """
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

"""The part of `realizar bench-serve` that loads servers with mixed kinds of requests, or with kinds in turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from realizar.cli.options.load import LoadOptions
from realizar.cli.options.mix import MixOptions
from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from realizar.bench.mix.requests import MixWork
    from realizar.bench.serve_client import Target

_LEAVE = 0.25


def make_mix_work(load: LoadOptions, options: MixOptions) -> MixWork:
    """The load that the options ask for; without lengths, those of a published trace.

    Raises:
        InvalidRequestError: a value is out of range, a kind is not known, or options exclude each other.
    """
    from realizar.bench.mix.compare import MIX
    from realizar.bench.mix.kinds import find_kind, parse_weights
    from realizar.bench.mix.lengths import TRACE_ANSWERS, TRACE_PROMPTS
    from realizar.bench.mix.requests import MixWork
    from realizar.bench.serve_workload import Lengths

    options.check()
    for name in options.kind:
        if name != MIX:
            find_kind(name, "kind")
    words, tokens = load.prompt_words, load.output_tokens
    return MixWork(
        weights=parse_weights(options.mix_weights, "mix-weights"),
        num_requests=load.requests if options.seconds is None else None,
        seconds=options.seconds,
        prompt_words=TRACE_PROMPTS if words is None else Lengths.parse(words, "prompt-words"),
        output_tokens=TRACE_ANSWERS if tokens is None else Lengths.parse(tokens, "output-tokens"),
        rate_per_s=load.rate,
        concurrency=load.open_at_once,
        leave_share=options.leave if options.leave is not None else 0.0 if options.kind else _LEAVE,
        shared_words=load.shared_words,
        ignore_eos=load.ignore_eos,
        chat=load.chat,
        seed=load.seed,
    )


def load_mixed(
    targets: Sequence[Target],
    work: MixWork,
    load: LoadOptions,
    options: MixOptions,
    context_length: int,
    log: Callable[[str], None],
) -> None:
    """Load servers, print the report and write the figures.

    Raises:
        InvalidRequestError: a server takes none of the kinds, or completed no request. HubError: it does not answer.
    """
    from realizar.bench.mix.compare import compare_mixes, find_server
    from realizar.bench.mix.generators import Generators, default_generators
    from realizar.bench.mix.report import as_markdown, as_record

    servers = [find_server(target, context_length) for target in targets]
    count = default_generators() if options.generators is None else options.generators
    with Generators(count) as generators:
        results = compare_mixes(
            servers, work, generators, alone=options.kind, rounds=load.rounds, timeout_s=load.timeout_s, log=log
        )
    print(as_markdown(results))
    if load.json_file is not None:
        record = as_record(results, {**asdict(work), "rounds": load.rounds, "generators": count, "kinds": options.kind})
        load.json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for result in results:
        runs = [run for each in result.runs.values() for run in each]
        if all(each.error is not None for run in runs for each in run.served):
            raise InvalidRequestError(f"{result.server.target.name} completed no request", "url")

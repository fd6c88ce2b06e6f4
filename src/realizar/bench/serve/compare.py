"""Loads on one server or on several: first which kinds each of them takes, then all loads in turn, in rounds, so that a
slow minute of the machine meets all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from realizar.bench.serve.client import Server, send
from realizar.bench.serve.dialects import UnknownFieldsError
from realizar.bench.serve.load import Generators, LoadRun
from realizar.bench.serve.servers import ServerState, read_state, wait_until_empty
from realizar.bench.serve.workload import Lengths, Workload, draw_request
from realizar.errors import InvalidRequestError

Log = Callable[[str], None]
_SHORT = Lengths(4, 4)
_REFUSALS = (400, 404, 405, 415, 422, 501)
MIX = "mix"
"""The label of a load of mixed kinds."""


@dataclass(slots=True)
class ServerRuns:
    """The runs of a server's loads, and what they left.

    Attributes:
        left_out: kinds that were not sent, and why.
        runs: of each load's label, one a round.
        state: the server's figures after its last load, the counters over its loads; None where it has none.
    """

    server: Server
    left_out: Mapping[str, str] = field(default_factory=dict)
    runs: dict[str, list[LoadRun]] = field(default_factory=dict)
    state: ServerState | None = None

    @property
    def all_runs(self) -> list[LoadRun]:
        return [run for runs in self.runs.values() for run in runs]


def compare_servers(
    servers: Sequence[Server],
    loads: Mapping[str, Workload],
    generators: Generators,
    *,
    rounds: int,
    timeout_s: float,
    log: Log,
    warmup: int = 0,
) -> list[ServerRuns]:
    """Put the same loads, by label, on every server, `rounds` times.

    Before the first round each server gets `warmup` requests that do not count; each kind is sent once in any case. It
    raises InvalidRequestError if a server takes none of the kinds, or does not answer.
    """
    results = [_tried(server, loads, warmup, timeout_s, log) for server in servers]
    before = [read_state(result.server) for result in results]
    for number in range(rounds):
        for label, work in loads.items():
            for result in results:
                log(f"round {number + 1} of {rounds}: {result.server.name}, {label}")
                _run_once(result, label, work, number, generators, timeout_s)
    for result, state in zip(results, before, strict=True):
        after = wait_until_empty(result.server)
        result.state = after.since(state) if after is not None and state is not None else after
    return results


def _run_once(
    result: ServerRuns, label: str, work: Workload, number: int, generators: Generators, timeout_s: float
) -> None:
    weights = {kind: weight for kind, weight in work.weights.items() if kind not in result.left_out}
    if not any(weights.values()):
        return
    server = result.server
    load = replace(
        work, weights=weights, seed=work.seed + number, salt=label, context_tokens=server.context_tokens
    )  # no load finds the prompts of another in a cache
    result.runs.setdefault(label, []).append(generators.run(server, load, timeout_s))


def _tried(server: Server, loads: Mapping[str, Workload], warmup: int, timeout_s: float, log: Log) -> ServerRuns:
    """Sends a short request of each kind, which also warms the server up; kinds that it refuses are left out."""
    kinds = {kind: work for work in loads.values() for kind in work.weights}
    left_out: dict[str, str] = {}
    for kind, work in kinds.items():
        short = replace(work, weights={kind: 1.0}, prompt_length=_SHORT)
        reason = _refusal(server, short, 0, timeout_s)
        if reason is not None and "ignore_eos" in reason and "ignore_eos" in server.dialect.known:
            log(f"{server.name} does not know ignore_eos: answers may be shorter than asked for")
            server = replace(server, dialect=replace(server.dialect, known=server.dialect.known - {"ignore_eos"}))
            reason = _refusal(server, short, 0, timeout_s)
        if reason is not None:
            left_out[kind] = reason
            log(f"{server.name} does not take {kind}: {reason}")
    if len(left_out) == len(kinds):
        raise InvalidRequestError(f"{server.name} takes none of the kinds: {next(iter(left_out.values()))}", "kind")
    for number in range(len(kinds), warmup):
        work = next(work for kind, work in kinds.items() if kind not in left_out)
        taken = {kind: weight for kind, weight in work.weights.items() if kind not in left_out}
        if (reason := _refusal(server, replace(work, weights=taken), number, timeout_s)) is not None:
            raise InvalidRequestError(f"{server.name}: {reason}", "url")
    return ServerRuns(server, left_out)


def _refusal(server: Server, work: Workload, number: int, timeout_s: float) -> str | None:
    """The server's reason not to take a request of a few tokens; None if it takes it.

    The prompt is not one of those measured, which the cache must not have. InvalidRequestError: it failed otherwise.
    """
    trial = replace(
        work, output_tokens=_SHORT, leave_share=0.0, seed=work.seed - 1, context_tokens=server.context_tokens
    )
    try:
        request = draw_request(trial, number, server.dialect, server.model)
    except UnknownFieldsError as error:
        return str(error)
    answer = asyncio.run(send(server, request, time.perf_counter(), timeout_s))
    if answer.error is None:
        return None
    if answer.error.startswith(tuple(f"status {status}" for status in _REFUSALS)):
        return answer.error
    raise InvalidRequestError(f"{server.name}: {answer.error}", "url")

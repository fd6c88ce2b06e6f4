"""One load on several servers in turn, in rounds, so that a slow minute of the machine meets all of them."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.client import HTTPException
from typing import Any

from realizar.bench.serve_client import Answered, Target, send
from realizar.bench.serve_run import LoadRun, run_load
from realizar.bench.serve_workload import PlannedRequest, Workload, plan_requests
from realizar.errors import HubError, InvalidRequestError

Log = Callable[[str], None]
_WARM_TOKENS = 4


def compare_servers(
    targets: Sequence[Target], work: Workload, *, rounds: int, warmup: int, timeout_s: float, log: Log
) -> list[LoadRun]:
    """Put the same load on every server, `rounds` times; gives a run for each, its rounds joined.

    Args:
        warmup: requests to each server before the first round, not counted.
        log: callback for progress messages.

    Raises:
        InvalidRequestError: a server refuses or does not answer a first request.
    """
    ready = [_warm(target, work, warmup, timeout_s, log) for target in targets]
    runs: list[list[LoadRun]] = [[] for _ in ready]
    for number in range(rounds):
        requests = plan_requests(replace(work, seed=work.seed + number))
        for index, target in enumerate(ready):
            log(f"round {number + 1} of {rounds}: {target.name}, {len(requests)} requests")
            runs[index].append(run_load(target, requests, work, timeout_s=timeout_s))
    return [_joined(each) for each in runs]


def _joined(runs: Sequence[LoadRun]) -> LoadRun:
    answered = tuple(each for run in runs for each in run.answered)
    return LoadRun(runs[0].target, answered, sum(r.duration_s for r in runs), sum(r.generator_cpu_s for r in runs))


def _warm(target: Target, work: Workload, warmup: int, timeout_s: float, log: Log) -> Target:
    """Sends first requests, one after the other. A server that does not know `ignore_eos` is asked without it."""
    # Other prompts than those measured: the server must not have them in its cache.
    spare = plan_requests(replace(work, num_requests=max(warmup, 1), seed=work.seed - 1))
    for number, request in enumerate(spare):
        answered = _send(target, request, timeout_s)
        if number == 0 and answered.error is not None and "ignore_eos" in answered.error:
            log(f"{target.name} does not know ignore_eos: answers may be shorter than asked for")
            target = replace(
                target, extra={name: value for name, value in target.extra.items() if name != "ignore_eos"}
            )
            answered = _send(target, request, timeout_s)
        if answered.error is not None:
            raise InvalidRequestError(f"{target.name}: {answered.error}", "url")
    return target


def _send(target: Target, request: PlannedRequest, timeout_s: float) -> Answered:
    tokens = min(request.max_tokens, _WARM_TOKENS)
    return asyncio.run(send(target, request.prompt, tokens, time.perf_counter(), timeout_s))


def first_model(url: str, api_key: str | None) -> str:
    """The name of a server's first model. Errors are those of `first_card`."""
    return str(first_card(url, api_key)["id"])


def first_card(url: str, api_key: str | None) -> dict[str, Any]:
    """The first entry of a server's list of models; `id` is the model's name.

    Raises:
        InvalidRequestError: the address is none. HubError: the server does not answer, or has none.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"a server's address starts with http:// or https://, not {url}", "url")
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            card: dict[str, Any] = dict(json.load(answer)["data"][0])
            card["id"] = str(card["id"])
    except urllib.error.HTTPError as error:
        raise HubError(f"{address} names no model (status {error.code}); name it with --model") from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise HubError(f"{url} does not answer: {text}") from None
    except (ValueError, LookupError, TypeError, HTTPException) as reason:
        raise HubError(f"{address} names no model ({reason}); name it with --model") from None
    return card

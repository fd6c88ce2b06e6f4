"""Streams of well-behaved clients. Each text must be what the same request gave alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from fuzz.report import Report

_PAUSE_S = 0.05
_PAUSE_AFTER_FAULT_S = 1.0
_PROMPT = "The river runs past the old stone garden where"
_BASE = {"prompt": _PROMPT, "stream": True, "max_tokens": 24}

# One of each road through the sampler.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {**_BASE, "temperature": 0},
    "sampled": {**_BASE, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 11},
    "penalised": {**_BASE, "temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "dry_multiplier": 0.8, "n": 2},
    "scored": {**_BASE, "temperature": 0, "logprobs": 3, "prompt": f"{_PROMPT} letters"},
    "shaped": {**_BASE, "temperature": 0.8, "seed": 3, "guided_regex": r"[a-z ]{10,20}[0-9]{2,4}"},
}


async def text_of(client: httpx.AsyncClient, model: str, kind: str, report: Report) -> str | None:
    """All that one stream said, choice by choice; None where it came to none, which is a fault.

    The client's requests are fewer than its share of the places, so that a full queue is no reason either.
    """
    texts: dict[int, str] = {}
    body = b""
    async with client.stream("POST", "/v1/completions", json={**KINDS[kind], "model": model}) as response:
        body = b"".join([piece async for piece in response.aiter_bytes()])
        if response.status_code != 200:
            report.fault(f"the healthy {kind} stream was refused with {response.status_code}: {body[:300]!r}")
            return None
    for event in body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if not event.startswith(b"data: ") or data == b"[DONE]":
            continue
        parsed = json.loads(data)
        if "error" in parsed:
            report.fault(f"the healthy {kind} stream ended with {parsed['error']}")
            return None
        for choice in parsed["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    if not body.rstrip().endswith(b"[DONE]"):
        report.fault(f"the healthy {kind} stream was cut off after {texts}")
        return None
    return json.dumps(texts, sort_keys=True)


async def texts_alone(client: httpx.AsyncClient, model: str, report: Report) -> dict[str, str]:
    """The text of each kind of request while nothing else runs."""
    alone = {}
    for kind in KINDS:
        text = await text_of(client, model, kind, report)
        alone[kind] = text or ""
    return alone


async def repeat(
    client: httpx.AsyncClient, model: str, kind: str, alone: str, until: asyncio.Event, report: Report
) -> None:
    """Repeat the same stream until the run stops it."""
    while not until.is_set():
        before = len(report.faults)
        await compare(client, model, kind, alone, report)
        await asyncio.sleep(_PAUSE_S if len(report.faults) == before else _PAUSE_AFTER_FAULT_S)


async def compare(client: httpx.AsyncClient, model: str, kind: str, alone: str, report: Report) -> None:
    """One stream beside whatever else runs."""
    try:
        text = await text_of(client, model, kind, report)
    except httpx.HTTPError as error:
        report.fault(f"the healthy {kind} stream failed: {type(error).__name__}: {error}")
        return
    report.counts["healthy streams"] += text is not None
    if text is not None and text != alone:
        report.fault(f"the healthy {kind} stream said {text} beside others, and alone {alone}")

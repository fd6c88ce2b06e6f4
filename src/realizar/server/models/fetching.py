"""`fetch_in_process` fetches a model in a process of its own, which ends with the request for it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any, cast

import msgspec

from realizar.errors import HubError, UnknownModelError
from realizar.hub.pull_process import COMMAND
from realizar.server.models.pulls import PullEvent, Report

_LONGEST_LINE = 1 << 20
_END_S = 5.0
"""Seconds for a process that is given up to end by itself."""


async def fetch_in_process(name: str, report: Report) -> Path:
    """See `Fetch`. The files lie where `realizar pull` has them.

    Raises:
        UnknownModelError: no model has the name.
        HubError: the model can't be fetched.
    """
    process = await asyncio.create_subprocess_exec(
        *COMMAND, name, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, limit=_LONGEST_LINE
    )
    try:
        return await _read(name, cast("asyncio.StreamReader", process.stdout), report)
    finally:
        if process.returncode is None:
            await _end(process)


async def _read(name: str, lines: asyncio.StreamReader, report: Report) -> Path:
    files: dict[str, dict[str, Any]] = {}
    async for line in lines:
        record = msgspec.json.decode(line)
        if "path" in record:
            return Path(record["path"])
        if "unknown" in record:
            raise UnknownModelError(record["unknown"])
        if "error" in record:
            raise HubError(record["error"])
        if "files" in record:
            files = {file["label"]: file for file in record["files"]}
        elif (file := files.get(record["label"])) is not None:
            report(_event(file, record["done"]))
    raise HubError(f"{name}: the process that pulled it has ended")


def _event(file: dict[str, Any], done: int) -> PullEvent:
    digest, size = file["digest"], file["size_bytes"]
    if digest is None:
        return PullEvent(f"pulling {file['label']}")
    return PullEvent(f"pulling {digest.partition(':')[2][:12]}", digest, size, done)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()

"""`python -m parity_table`, with `tests` on the path: what `make parity` runs last."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import sys
from typing import Any

from architectures import CASES
from models.parity_rows import digest
from parity_table.checkpoints import forms_of
from parity_table.measure import measure
from parity_table.page import DEVICES, load, save
from parity_table.vocabularies import measure_vocabularies
from realizar.backends.machine import read_machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m parity_table", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, help="by default every one of this machine")
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="rows of these alone")
    options = parser.parse_args()
    devices = [options.device] if options.device else [device for device in DEVICES if device == "cpu" or _has_gpu()]
    figures, failed = load(), []
    for device in devices:
        for name in options.case or CASES:
            if device in CASES[name].run_by:
                failed += _measure_rows(figures["rows"], name, device)
        figures["measured"][device] = _stamp(device)
    if "cpu" in devices:
        figures["vocabularies"] = measure_vocabularies()
    save(figures)
    sys.stderr.writelines(f"{each}\n" for each in failed)
    return 1 if failed else 0


def _measure_rows(rows: dict[str, Any], name: str, device: Any) -> list[str]:
    """Note the figures of a row of `CASES`; returns what failed."""
    failed = []
    for form in forms_of(name):
        row = f"{name} {form}"
        if rows.get(row, {}).get("digest") != digest(name):
            rows[row] = {"digest": digest(name)}
        try:
            rows[row][device] = measure(name, form, device).as_json()
        except AssertionError as error:
            failed.append(f"{device}: {error}")
        sys.stdout.write(f"{device} {row} {rows[row].get(device, failed[-1:])}\n")
        sys.stdout.flush()
    return failed


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _stamp(device: str) -> str:
    import torch

    name = read_machine().processor if device == "cpu" else torch.cuda.get_device_name()
    version = importlib.metadata.version("transformers")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return f"{today}, `make parity`, {name}, transformers {version}"


if __name__ == "__main__":
    sys.exit(main())

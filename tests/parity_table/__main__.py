"""`python -m parity_table`, with `tests` on the path: what `make parity` runs last."""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from architectures import CASES, DeviceKind
from images.vision_kinds import KINDS
from models.parity_rows import digest
from parity_table.checkpoints import Weights, forms_of
from parity_table.images import measure_images
from parity_table.measure import Found, measure_forms
from parity_table.page import DEVICES, image_digest, load, save
from parity_table.stored import METHODS, MODELS
from parity_table.vocabularies import measure_vocabularies
from realizar.backends.machine import read_machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m parity_table", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, help="by default every one of this machine")
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="rows of these alone")
    parser.add_argument("--methods", action="store_true", help="rows of the methods of safetensors alone")
    parser.add_argument("--processes", type=int, default=1, help="that measure beside each other, a form each")
    parser.add_argument("--images", action="store_true", help="the models that see alone")
    options = parser.parse_args()
    devices = [options.device] if options.device else [device for device in DEVICES if device == "cpu" or _has_gpu()]
    figures, failed = load(), []
    is_part = options.case or options.methods or options.images
    names = options.case or (MODELS if options.methods else () if options.images else CASES)
    wanted = [
        (name, device, [form for form in forms_of(name) if form in METHODS or not options.methods])
        for device in devices for name in names if device in CASES[name].run_by
    ]  # fmt: skip
    some = [*(options.case or []), *(["methods"] if options.methods else [])]
    for name, device, found in _measured(wanted, options.processes):
        failed += _note(figures["rows"], name, device, found)
        _stamp(figures["measured"], device, some)
        save(figures)
    for device in devices if options.images or not is_part else ():
        failed += _note_images(figures, device, options.processes)
        if options.images:
            _stamp(figures["measured"], device, ["images"])
    if "cpu" in devices:
        figures["vocabularies"] = measure_vocabularies()
    save(figures)
    sys.stderr.writelines(f"{each}\n" for each in failed)
    return 1 if failed else 0


def _measured(
    wanted: Sequence[tuple[str, DeviceKind, Sequence[Weights]]], processes: int
) -> Iterator[tuple[str, DeviceKind, Found]]:
    """The figures of rows on devices, in some forms; each in any order where there are several processes."""
    if processes == 1:
        yield from ((name, device, measure_forms(name, device, forms)) for name, device, forms in wanted)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        started = {
            pool.submit(measure_forms, name, device, [form]): (name, device)
            for name, device, forms in wanted for form in forms
        }  # fmt: skip
        for done in as_completed(started):
            yield (*started[done], done.result())


def _note(rows: dict[str, Any], name: str, device: DeviceKind, found: Found) -> list[str]:
    """Note the figures of a row; returns what failed."""
    failed = []
    for form, figures in found.items():
        row = f"{name} {form}"
        if rows.get(row, {}).get("digest") != digest(name, form):
            rows[row] = {"digest": digest(name, form)}
        if isinstance(figures, str):
            failed.append(f"{device}: {figures}")
        else:
            rows[row][device] = figures
        sys.stdout.write(f"{device} {row} {figures}\n")
        sys.stdout.flush()
    return failed


def _note_images(figures: dict[str, Any], device: DeviceKind, processes: int) -> list[str]:
    """Measure the models that see on a device, and note their figures; returns what failed."""
    failed = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        started = {pool.submit(measure_images, kind, device): kind for kind in KINDS}
        for done in as_completed(started):
            kind = started[done]
            if (error := done.exception()) is not None:
                failed.append(f"{device}: {kind} with images: {error}")
                continue
            if figures["images"].get(kind, {}).get("digest") != image_digest(kind):
                figures["images"][kind] = {"digest": image_digest(kind)}
            figures["images"][kind][device] = done.result()
            save(figures)
            sys.stdout.write(f"{device} {kind} with images {done.result()}\n")
            sys.stdout.flush()
    return failed


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _stamp(measured: dict[str, str], device: str, some: Sequence[str]) -> None:
    """Say when and where the rows of a device were measured: all, or some of them since."""
    import torch

    if not some:
        for earlier in [each for each in measured if each.startswith(f"{device}, ")]:
            del measured[earlier]
    name = read_machine().processor if device == "cpu" else torch.cuda.get_device_name()
    version = importlib.metadata.version("transformers")
    today = dt.datetime.now(dt.UTC).date().isoformat()
    option = next((f"--{part}" for part in ("methods", "images") if part in some), "--case")
    command = f"python -m parity_table {option}" if some else "make parity"
    measured[", ".join([device, *some])] = f"{today}, `{command}`, {name}, transformers {version}"


if __name__ == "__main__":
    sys.exit(main())

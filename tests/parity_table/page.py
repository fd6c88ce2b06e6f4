"""`docs/parity.md`, from the figures in `tests/data/parity.json`."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

from architectures import CASES
from images.vision_kinds import KINDS, TEXT, VISION
from models.parity_rows import digest
from parity_table.checkpoints import forms_of

FIGURES = Path(__file__).parents[1] / "data" / "parity.json"
PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
DEVICES = ("cpu", "cuda")
IMAGE_PARTS = ("features", "features from GGUF", "one image", "three images")
"""Of a model that sees, what is compared."""
DIFFERENCES = {
    "arcee-biases-tied": "it knows no biases after attention and in the feed-forward",
    "exaone4": "it knows windows by the number of layers of the published model",
    "exaone4-without-windows": "it expects heads that are together as wide as the hidden size",
    "gpt-oss": "it rounds the ends of YaRN's ramp, and reads no betas; transformers told so agrees: 6.0e-07, 2.5e-06",
    "mistral": "it has no window in a llama",
    "mixtral": "it has no window in a llama",
    "olmoe": "it expects as many KV heads as heads",
    "phi3": "it turns the window off",
    "phi3-short": "it pads the context to 256 tokens, and so takes the long factors",
    "qwen2": "it has no window in a qwen2",
    "seed_oss": "it knows no bias after attention and in the feed-forward",
    "starcoder2": "it has no window in a starcoder2",
}
"""Why llama.cpp (its sources of late 2026) computes another thing, or does not read the file: by its sources."""

_HEAD = """\
# Parity

Every architecture is compared with transformers in float32 on small models of random weights: several layers of each
kind, sequences past every window and every original context. `make parity` measures what its machine can and writes
this page from `tests/data/parity.json`; figures of a GPU stay until a machine with one measures again.

An error is the norm of the difference of all logits over the norm of transformers', after prompts of 8 and of 600
tokens. In rows of F32 weights no single token is beyond 1e-4, or the command fails. A quantised file holds random
blocks, and transformers has what they say in float32: its errors come from activations of eight bits, the cache's
type, and, in mixtures, from tokens whose choice of experts is nearly a tie and falls the other way. So do those of
methods that safetensors are published in; through the specification, in float32, no token of theirs is beyond 1e-4.
"Alone" says that rows of a batch, in random chunks, have the bits that each has alone (on CUDA with
`--batch-invariant`).
"""


def image_digest(kind: str) -> str:
    """As `digest`, of a model of `vision_kinds`, by the code that makes it."""
    made = KINDS[kind]
    code = f"{inspect.getsource(made.func)}{made.args}{TEXT}{VISION}"
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def load() -> dict[str, Any]:
    """The figures that were noted, by section."""
    empty: dict[str, Any] = {"measured": {}, "rows": {}, "images": {}, "vocabularies": {}}
    return json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else empty


def save(figures: dict[str, Any]) -> None:
    """Note the figures without those of rows that are gone or changed, and write the page."""
    kept = {f"{name} {form}": digest(name, form) for name in CASES for form in forms_of(name)}
    figures["rows"] = {row: each for row, each in figures["rows"].items() if kept.get(row) == each["digest"]}
    seeing = figures["images"].items()
    figures["images"] = {kind: each for kind, each in seeing if kind in KINDS and image_digest(kind) == each["digest"]}
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(render(figures), encoding="utf-8")


def render(figures: dict[str, Any]) -> str:
    """The page."""
    lines = [_HEAD, *(f"- {device}: {each}" for device, each in sorted(figures["measured"].items())), ""]
    lines += [
        "| model | weights | CPU, 8 | CPU, 600 | alone | CUDA, 8 | CUDA, 600 | alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        for form in forms_of(name):
            row = figures["rows"].get(f"{name} {form}", {})
            cells = [cell for device in DEVICES for cell in _cells(row.get(device), device in case.run_by)]
            lines.append(f"| {name} | {form} | {' | '.join(cells)} |")
    lines += ["", *_images(figures["images"])]
    lines += ["", *_llama_cpp(figures.get("llama.cpp", {})), "", *_vocabularies(figures["vocabularies"])]
    return "\n".join(lines) + "\n"


def _cells(found: dict[str, Any] | None, runs: bool) -> list[str]:
    if not runs:
        return ["refused"] * 3
    if found is None:
        return ["not measured"] * 3
    if "refused" in found:
        return [f"refused: {found['refused']}", "refused", "refused"]
    errors = [f"{found['errors'][length]:.1e}" if length in found["errors"] else "-" for length in ("8", "600")]
    return [*errors, {True: "equal", False: "differs", None: "refused"}[found["batch_equals_alone"]]]


def _images(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "Models that see: features of images of 1 x 1, 28 x 28, 333 x 777, 2,000 x 300 and 3,000 x 2,000 pixels, from",
        "safetensors and from a GGUF file, and log-probabilities of the tokens of prompts with images. An error is the",
        "norm of the difference over the norm. No feature and no token is beyond 1e-4, or `make parity` fails.",
        "",
        f"| model | {' | '.join(f'{device.upper()}, {part}' for device in DEVICES for part in IMAGE_PARTS)} |",
        f"|{'---|' * (1 + len(DEVICES) * len(IMAGE_PARTS))}",
    ]
    for kind in KINDS:
        measured = [(found.get(kind, {}).get(device, {}), part) for device in DEVICES for part in IMAGE_PARTS]
        cells = [f"{errors[part]:.1e}" if part in errors else "not measured" for errors, part in measured]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def _llama_cpp(found: dict[str, dict[str, float | None]]) -> list[str]:
    lines = [
        "llama.cpp reads the same F32 files, with a cache in float32 and on a CPU. Its own errors to transformers, by",
        "`python -m parity_table.llama_cpp`. Its GELU is a table in float16, which gemma and starcoder2 show:",
        "",
        "| model | 8 | 600 | where it differs |",
        "|---|---|---|---|",
    ]
    for name, errors in sorted(found.items()):
        cells = [_peer_cell(errors[length]) if length in errors else "-" for length in ("8", "600")]
        lines.append(f"| {name} | {' | '.join(cells)} | {DIFFERENCES.get(name, '')} |")
    return lines


def _peer_cell(error: float | None) -> str:
    return "not read" if error is None else f"{error:.1e}"


def _vocabularies(found: dict[str, dict[str, int]]) -> list[str]:
    lines = [
        "Tokens are compared with those of the model's own tokenizer and of llama.cpp; prompts, as the chat template",
        "writes them, with transformers' bytes.",
        "",
        "| vocabulary | texts with the same tokens | conversations with the same bytes |",
        "|---|---|---|",
    ]
    for name, each in found.items():
        template = f"{each['equal_conversations']} of {each['conversations']}" if each["conversations"] else "-"
        lines.append(f"| {name} | {each['equal_texts']} of {each['texts']} | {template} |")
    return lines

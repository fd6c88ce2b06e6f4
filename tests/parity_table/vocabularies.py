"""Tokens and chat templates of the vocabularies at hand, against what others make of the same texts."""

from __future__ import annotations

import copy
import json
import lzma
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from realizar.checkpoint.open import open_checkpoint
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.templates.chat_template import ChatTemplate
from realizar.tokenizer.tokenizer import Tokenizer

_DATA = Path(__file__).parents[1] / "data" / "tokenizers"
_SEPARATOR = "\n__ggml_vocab_test__\n"
_USER = {"role": "user", "content": "  Two words\n\nand `three` more: 漢字, ¼ — ok?  "}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [_USER],
    [_USER, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
    [{"role": "system", "content": "Be brief."}, _USER],
    [{"role": "system", "content": ""}, _USER, {"role": "assistant", "content": "A\nB"}, _USER],
)


@dataclass(frozen=True)
class VocabularyFigures:
    """Of one vocabulary: texts with the recorded tokens, and conversations with transformers' bytes, each of so many.

    Attributes:
        conversations: those that the template takes; a vocabulary without a template has none.
    """

    texts: int
    equal_texts: int
    conversations: int
    equal_conversations: int


def measure_vocabularies() -> dict[str, dict[str, int]]:
    """The figures by name of a vocabulary."""
    recorded = json.loads(lzma.decompress((_DATA / "recorded.json.xz").read_bytes()))
    return {name: asdict(_measure(name, recorded)) for name in sorted(recorded["vocabularies"])}


def _measure(name: str, recorded: dict[str, Any]) -> VocabularyFigures:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        path.write_bytes(lzma.decompress((_DATA / f"{name}.gguf.xz").read_bytes()))
        tokenizer = load_tokenizer(open_checkpoint(path))
    expected = list(zip(recorded["texts"], recorded["vocabularies"][name]["plain"], strict=True))
    with (_DATA / f"{name}.inp").open(encoding="utf-8", newline="") as stream:
        texts = stream.read().removesuffix(_SEPARATOR).split(_SEPARATOR)
    lines = (_DATA / f"{name}.out").read_text(encoding="utf-8").splitlines()
    expected += [(text, [int(n) for n in line.split()]) for text, line in zip(texts, lines, strict=True)]
    equal = sum(tokenizer.encode(text, add_special=False, parse_special=False) == ids for text, ids in expected)
    template = tokenizer.chat_templates.get("default")
    rendered = _templates(tokenizer, template) if template else []
    return VocabularyFigures(len(expected), equal, len(rendered), sum(rendered))


def _templates(tokenizer: Tokenizer, template: str) -> list[bool]:
    """True for each conversation with the same bytes; one that the template refuses itself is left out."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    equal = []
    for messages in _CONVERSATIONS:
        try:
            expected, _ = render_jinja_template(
                [copy.deepcopy(messages)], chat_template=template, add_generation_prompt=True,
                **tokenizer.special_texts,
            )  # fmt: skip
        except TemplateError:
            continue
        equal.append(ChatTemplate(tokenizer).render(messages) == expected[0])
    return equal

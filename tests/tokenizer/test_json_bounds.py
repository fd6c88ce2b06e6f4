"""Hostile `tokenizer.json` files: an error that names the file and the part, within a little memory, and no panic.

They are read in one process of their own with a bound on its memory: without the checks they take all there is.
"""

from __future__ import annotations

import base64
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, InvalidRequestError
from realizar.tokenizer.load import load_tokenizer
from waits import HANG_S

GOOD: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2, "H": 3, "i": 4, "Hi": 5},
        "merges": ["a b", "H i"],
        "unk_token": None,
        "byte_fallback": False,
    },
}


def token(index: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": True, **flags}


def template(*single: dict[str, Any], ids: int = 0) -> dict[str, Any]:
    names = {"X": {"id": "X", "ids": [5] * ids, "tokens": ["Hi"] * ids}} if ids else {}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": list(single), "pair": pair, "special_tokens": names}


def replaced(by: str, times: int = 1) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "i"}, "content": by}
    return {"type": "Sequence", "normalizers": [step] * times}


def unigram(*pieces: str) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces], "byte_fallback": False}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
# A trie of one node whose children lie outside it.
WILD_TRIE = (8).to_bytes(4, "little") + b"\0\xff\xff\xff" * 2 + b"x\0"
HUGE_TRIE = b"\xff\xff\xff\xff" + b"\0" * 16

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "replace": ({"normalizer": replaced("i" * 30, 6)}, "'normalizer': makes up to 7.29e+08 bytes of one"),
    "steps": ({"normalizer": replaced("i", 100)}, "'normalizer': has 101 steps"),
    "byte levels": (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}] * 40,
            }
        },
        "'normalizer': makes up to 1.1e+12 bytes of one",
    ),
    "empty pattern": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "x" * 5000}},
        "makes up to 5e+03 bytes of one",
    ),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "x" * 100}}, "puts 100 characters before a text"),
    "pattern": (
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "a|" * 10000},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        "a pattern has 20000 bytes",
    ),
    "one long token": ({"added_tokens": [token(6, "x" * 1_000_000)]}, "token 6 has 1000000 characters"),
    "tokens without end": (
        {"added_tokens": [token(6 + index, f"<{index}>") for index in range(20_000)]},
        "'added_tokens': token number 20005 is beyond the model's 8 rows",
    ),
    "tokens of one number": (
        {"added_tokens": [token(6, f"<{index}>") for index in range(5000)]},
        "'added_tokens': it has 5006 tokens for the model's 8 rows",
    ),
    "a number too high": ({"added_tokens": [token(4_294_967_295, "<s>")]}, "token number 4294967295 is beyond"),
    "a high number in the vocabulary": (
        {"model": {**GOOD["model"], "vocab": {**GOOD["model"]["vocab"], "x": 4_000_000_000}}},
        "token number 4000000000 is beyond",
    ),
    "a piece without end": ({"model": unigram("a", "x" * 1_000_000)}, "'model.vocab': token 1 has 1000000 characters"),
    "merges": ({"model": {**GOOD["model"], "merges": ["a b"] * 20_000}}, "'model.merges': 19999 parts of merges"),
    "text twice": ({"post_processor": template(TEXT, TEXT)}, "'post_processor': does not hold the text once"),
    "no text": ({"post_processor": template()}, "'post_processor': does not hold the text once"),
    "additions": (
        {"post_processor": template({"SpecialToken": {"id": "X", "type_id": 0}}, TEXT, ids=100)},
        "'post_processor': adds more than 64 tokens",
    ),
    "charsmap of gigabytes": ({"normalizer": charsmap(HUGE_TRIE)}, "the size of its trie does not fit"),
    "charsmap that points outside": ({"normalizer": charsmap(WILD_TRIE)}, "its trie points outside itself"),
    # What only the library itself finds: errors and panics of its own.
    "panic while reading": (
        {"model": {**GOOD["model"], "continuing_subword_prefix": "#" * 10}},
        "tokenizer: is malformed: range end index",
    ),
    "panic with the first text": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "tokenizer: fails on the text 'a': chunk size must be non-zero",
    ),
    "a template that names no token": (
        {"post_processor": template({"SpecialToken": {"id": "Y", "type_id": 0}}, TEXT)},
        "tokenizer: fails on the text 'a': no entry found",
    ),
    "no unknown token": ({"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "?"}}, "Missing [UNK]"),
}

READ_EACH = """
import json, resource, sys
from pathlib import Path
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError
from realizar.tokenizer.load import load_tokenizer
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load_tokenizer(Checkpoint(path.parent, "safetensors", {"config": {"vocab_size": 8}}, {}, tokenizer_path=path))
        said = "loaded"
    except CheckpointError as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([path.stem, said, grown, path.stat().st_size]), flush=True)
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int, int]]:
    """The message, the KiB that the process grew by and the file's bytes, by case."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, (change, _) in REFUSED.items():
        (folder / f"{name}.json").write_text(json.dumps({**copy.deepcopy(GOOD), **change}))
    done = subprocess.run(
        [sys.executable, "-c", READ_EACH, str(folder)], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    return {name: (said, grown, size) for name, said, grown, size in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_within_bounds(case: str, read: dict[str, tuple[str, int, int]]) -> None:
    said, grown_kib, size = read[case]
    assert f"{case}.json: " in said
    assert REFUSED[case][1] in said
    assert said.isprintable()
    assert grown_kib < (64 << 10) + 8 * size // 1024


@pytest.mark.parametrize("key", ["added_tokens", "model.vocab"])
def test_lists_without_end_are_counted_before_they_are_parsed(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"added_tokens": 4, "model.vocab": 2}[key]
    monkeypatch.setattr("realizar.tokenizer.json_tokenizer.MAX_TOKENS", most)
    with pytest.raises(CheckpointError, match=rf"key '{key}': has some \d+ tokens, above {most}"):
        load(tmp_path, {"added_tokens": [token(0, "a")] * 9})


def load(folder: Path, change: dict[str, Any], rows: int = 8) -> Any:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**copy.deepcopy(GOOD), **change}))
    config = {"config": {"vocab_size": rows}}
    return load_tokenizer(Checkpoint(folder, "safetensors", config, {}, tokenizer_path=path))


def test_what_real_files_have_is_taken(tmp_path: Path) -> None:
    """Spaces written as U+2581, a token or two past the model's rows, tokens that are in the vocabulary too."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces, {"type": "NFKC"}]}
    change = {
        "normalizer": steps,
        "added_tokens": [token(0, "a"), *(token(6 + index, f"<{index}>") for index in range(4))],
        "post_processor": template({"SpecialToken": {"id": "X", "type_id": 0}}, TEXT, ids=1),
    }
    tokenizer = load(tmp_path, change)
    assert tokenizer.encode("<3>Hi") == [5, 9, 5]
    assert tokenizer.vocab_size == 10


def test_a_multi_modal_configuration_names_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**GOOD, "added_tokens": [token(2000, "<s>")]}))
    metadata: dict[str, Any] = {"config": {"text_config": {"vocab_size": 3000}}}
    assert load_tokenizer(Checkpoint(tmp_path, "safetensors", metadata, {}, tokenizer_path=path)).vocab_size == 3000
    metadata["config"]["text_config"]["vocab_size"] = 900
    with pytest.raises(CheckpointError, match="token number 2000 is beyond the model's 900 rows"):
        load_tokenizer(Checkpoint(tmp_path, "safetensors", metadata, {}, tokenizer_path=path))


def test_a_text_that_grows_is_refused_by_itself(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"normalizer": replaced("i" * 200)})
    assert len(tokenizer.encode("ab")) == 1
    assert len(tokenizer.encode("i" * 10)) == 2000
    with pytest.raises(InvalidRequestError, match="more than 16 times as long"):
        tokenizer.encode("i" * 10_000)


@pytest.mark.parametrize("text", ["c" + "a" * 30 + "!", "a" * 5000 + "!"])
def test_a_panic_with_a_text_is_that_texts_error(tmp_path: Path, text: str) -> None:
    """The expression backtracks until the library gives up, which it does by a panic."""
    pattern = {"Regex": "(?=(a+)+b)"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    tokenizer = load(tmp_path, {"pre_tokenizer": split})
    with pytest.raises(InvalidRequestError, match="the tokenizer fails on this text: Onig"):
        tokenizer.encode(text)
    assert tokenizer.encode("Hi") == [5], "and the next text is none the worse"

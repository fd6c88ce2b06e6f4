"""Log-probabilities are written as the JSON of the objects that the API describes."""

from __future__ import annotations

import codecs
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import TokenLogprobs
from realizar.server.generation.logprob_rows import chat_rows
from realizar.server.openai.logprobs import (
    CompletionLogprobsMaker,
    CompletionToken,
    completion_rows,
    write_chat,
    write_completion,
)
from realizar.server.token_names import TokenNames, TokenParts, parts_of
from server.scripted_engine import ByteTokenizer

TOKENIZER = ByteTokenizer(None)  # id 0 is a control token, ids from 128 on are parts of characters
NAMES = {as_ids: TokenNames(TOKENIZER, as_ids=as_ids) for as_ids in (False, True)}
_ID = st.sampled_from([0, 10, 34, 65, 66, 92, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xFF])
_VALUE = st.floats(-20.0, 0.0) | st.sampled_from([-math.inf, -9999.0, -10000.0, -0.0, -1e-7])
_ENTRY = st.builds(
    TokenLogprobs, _ID, _VALUE, st.integers(1, 9), st.lists(st.tuples(_ID, _VALUE), max_size=4).map(tuple)
)


def name_of(token_id: int, *, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token_id}"
    return chr(token_id) if token_id < 128 else f"bytes:\\x{token_id:02x}"


def value_of(logprob: float) -> float:
    return max(logprob, -9999.0)


def chat_object(entries: Sequence[TokenLogprobs], top_n: int, *, as_ids: bool) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name_of(token_id, as_ids=as_ids), "logprob": value_of(logprob), "bytes": [token_id]}

    content = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top[:top_n]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


@given(entries=st.lists(_ENTRY, max_size=5), top_n=st.integers(0, 5), as_ids=st.booleans(), columns=st.booleans())
def test_chat_logprobs(entries: list[TokenLogprobs], top_n: int, as_ids: bool, columns: bool) -> None:
    rows = chat_rows(NAMES[as_ids], top_n)
    written = write_chat(rows.rows(LogprobColumns.of(entries) if columns else entries))
    assert written == msgspec.json.encode(chat_object(entries, top_n, as_ids=as_ids))
    step = LogprobColumns.of(entries)
    for place, entry in enumerate(entries):
        alone = write_chat(rows.rows(StepEntry(step, place)))
        assert alone == msgspec.json.encode(chat_object([entry], top_n, as_ids=as_ids))


@given(
    deltas=st.lists(st.lists(_ENTRY, max_size=4), max_size=4),
    top_n=st.integers(0, 5),
    as_ids=st.booleans(),
    prompt=st.booleans(),
    spelled=st.booleans(),
)
def test_completion_logprobs(
    deltas: list[list[TokenLogprobs]], top_n: int, as_ids: bool, prompt: bool, spelled: bool
) -> None:
    """Offsets go on over deltas, also inside a character; a prompt's first token has null."""
    rows = completion_rows(NAMES[as_ids], top_n)
    maker, streamed = (CompletionLogprobsMaker(NAMES[as_ids], rows) for _ in range(2))
    decoder, whole = codecs.getincrementaldecoder("utf-8"), []
    text, at, joined = decoder("replace"), 0, list[CompletionToken]()
    for place, delta in enumerate(deltas):
        ids = [entry.token_id for entry in delta]
        entries: list[TokenLogprobs | None] = [*delta]
        if prompt and place == 0:
            ids, entries = [66, *ids], [None, *entries]
        wanted: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(ids, entries, strict=True):
            wanted["tokens"].append(name_of(token_id, as_ids=as_ids))
            wanted["text_offset"].append(at)
            at += len(text.decode(b"" if token_id == 0 and not spelled else bytes([token_id])))
            wanted["token_logprobs"].append(None if entry is None else value_of(entry.logprob))
            top: dict[str, float] = {}
            for listed, value in () if entry is None else (*entry.top[:top_n], (token_id, entry.logprob)):
                top.setdefault(name_of(listed, as_ids=as_ids), value_of(value))
            wanted["top_logprobs"].append(None if entry is None else top)
        given = entries if None in entries else LogprobColumns.of(delta)
        made = maker.make(ids, given, spelled=spelled)
        assert write_completion(made) == msgspec.json.encode(wanted)
        if isinstance(given, LogprobColumns) and len(ids) == 1:
            given = StepEntry(LogprobColumns.of([delta[0], *deltas[0]]), 0)
        assert streamed.text(ids, given, spelled=spelled) == msgspec.json.encode(wanted)
        joined += made
        whole.append(wanted)
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert write_completion(joined) == msgspec.json.encode(
        {key: [each for part in whole for each in part[key]] for key in keys}
    )


def test_parts_of_ids_are_in_their_order() -> None:
    parts = [b"a", b"b", b"c"]
    assert list(parts_of(parts, [2, 0, 2])) == [b"c", b"a", b"c"]
    assert list(parts_of(parts, [1])) == [b"b"]
    assert list(parts_of(parts, [])) == []


def test_parts_of_all_tokens() -> None:
    """Control tokens have a name and no text; what is no character by itself has no number of them."""
    named, by_id = NAMES[False].parts, NAMES[True].parts
    assert (named.names[0], named.data[0], named.num_characters[0]) == (b'"\\u0000"', b"[0]", 0)
    assert (named.names[65], named.data[65], named.num_characters[65]) == (b'"A"', b"[65]", 1)
    assert (named.names[255], named.data[255], named.num_characters[255]) == (b'"bytes:\\\\xff"', b"[255]", -1)
    assert by_id.names[255] == b'"token_id:255"'
    assert len(named.names) == len(named.data) == len(by_id.names) == TOKENIZER.vocab_size


def test_names_are_made_once_however_many_threads_ask() -> None:
    everyone = threading.Barrier(4)
    made: list[int] = []

    class Counted(ByteTokenizer):
        def vocabulary_bytes(self) -> list[bytes]:
            made.append(threading.get_ident())
            time.sleep(0.05)  # the others ask by now, or find them made
            return super().vocabulary_bytes()

    names = TokenNames(Counted(None))

    def ask(_: int) -> TokenParts:
        everyone.wait()
        return names.parts

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(ask, range(4))
    assert len(made) == 1
    assert all(each is first for each in others)

"""Drafts by prompt lookup: what is proposed, and what becomes of a row when only some of it was right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.batch import FROM_PREVIOUS_STEP, PROPOSED, ProposedDrafts, ScheduledBatch, StepOutput
from realizar.scheduler.drafts import DraftDepth, DraftLookup, Prediction
from scheduler.scheduler_runs import answer, make_scheduler, request, shape
from step_inputs import RowOutput, rows_of, step_output, updated


def looked_up(tokens: list[int], count: int, longest: int, shortest: int) -> tuple[int, ...]:
    """The same by trying every place: the longest run of last tokens that stood before, at its latest place."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                drafts: list[int] = []
                for place in range(end, end + count):
                    drafts.append((tokens + drafts)[place])
                return tuple(drafts)
    return ()


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256, 65536, 257]), min_size=1, max_size=30),
    count=st.integers(0, 6),
    longest=st.integers(1, 4),
    shortest=st.integers(1, 4),
)
def test_the_latest_place_of_the_longest_match(tokens: list[int], count: int, longest: int, shortest: int) -> None:
    """Ids whose bytes look alike when shifted; the history grows between look-ups."""
    lookup = DraftLookup(6, longest, min(shortest, longest))
    for end in range(1, len(tokens) + 1, 3):
        known = tokens[:end]
        wanted = looked_up(known, count, longest, min(shortest, longest)) if count else ()
        assert lookup.propose(np.array(known, np.int32), count) == wanted


def followed(prediction: list[int], answer: list[int], most: int = 3) -> list[tuple[int, ...]]:
    """The drafts after each token of an answer, whose tokens come one or two at a time."""
    found, part = Prediction(prediction, 4, 2), np.array(answer, np.int32)
    return [found.propose(part[:end], most) for end in range(1, len(answer) + 1)]


def test_an_answer_that_repeats_its_prediction_is_foreseen() -> None:
    text = [5, 6, 7, 5, 6, 9]
    assert followed(text, text) == [(6, 7, 5), (7, 5, 6), (5, 6, 9), (6, 9), (9,), ()]


def test_an_answer_is_found_again_behind_a_change() -> None:
    text = [*range(10, 30)]
    changed, longer, shorter = [*text[:5], 99, *text[6:]], [*text[:5], 99, 98, *text[5:]], [*text[:5], *text[8:]]
    assert followed(text, changed)[4:9] == [(15, 16, 17), (), (), (18, 19, 20), (19, 20, 21)]
    assert followed(text, longer)[4:10] == [(15, 16, 17), (), (), (), (17, 18, 19), (18, 19, 20)]
    assert followed(text, shorter)[4:7] == [(15, 16, 17), (), (20, 21, 22)]


def test_what_stands_before_the_place_is_not_found_again() -> None:
    """Nor bytes that look like the ids in between two of them."""
    text = [1, 2, 3, 4, 1, 2, 7]
    assert followed(text, [1, 2, 3, 4, 9, 1, 2])[-1] == (7,)
    assert followed(text, [1, 2, 3, 4, 1, 2, 9, 1, 2])[-1] == ()
    assert followed([0x01000000, 0x02000000, 3], [0x0100, 0x0200])[-1] == ()


@given(
    text=st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=20),
    answer=st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=30),
)
def test_drafts_are_parts_of_the_prediction(text: list[int], answer: list[int]) -> None:
    whole = Prediction(text, 4, 2).propose(np.array(answer, np.int32), 4)
    assert whole == followed(text, answer, 4)[-1]
    assert not whole or any(tuple(text[at : at + len(whole)]) == whole for at in range(len(text)))


def test_fewer_are_proposed_while_they_are_wrong() -> None:
    lookup = DraftLookup(8, 2, 1)
    text = np.array([1, 2] * 5, np.int32)
    assert len(lookup.propose(text, 20)) == 8
    lookup.verified(3)
    assert len(lookup.propose(text, 20)) == 6
    lookup.verified(0)
    assert len(lookup.propose(text, 20)) == 1
    lookup.verified(1)
    assert len(lookup.propose(text, 20)) == 2


def test_a_wrong_draft_has_a_longer_match_looked_for_until_one_is_right() -> None:
    lookup, text = DraftLookup(4, 3, 1), np.array([1, 2, 3, 4, 9, 3], np.int32)
    assert lookup.propose(text, 2) == (4, 9)
    lookup.verified(0)
    assert lookup.propose(np.append(text, [7, 3]).astype(np.int32), 2) == ()
    longer = np.append(text, [7, 3, 1, 2, 3]).astype(np.int32)
    assert lookup.propose(longer, 2) == (4,)
    lookup.verified(1)
    assert lookup.propose(np.append(longer, [4, 3]).astype(np.int32), 2) == (4, 3)


def test_right_drafts_count_as_computed_and_wrong_ones_do_not() -> None:
    scheduler = make_scheduler(drafts=3)
    scheduler.add(request("a", (5, 6, 7, 8, 5)))
    answer(scheduler, scheduler.schedule(), 6)
    batch = scheduler.schedule()
    assert [(row.token_ids, row.draft_ids) for row in rows_of(batch)] == [((6, 7, 8, 5), (7, 8, 5))]
    (output,) = updated(scheduler, batch, step_output([RowOutput((7, 9))]))
    assert output.token_ids == (7, 9)
    batch = scheduler.schedule()  # 9 is new: nothing stood after it
    assert [(row.num_computed_tokens, row.token_ids) for row in rows_of(batch)] == [(7, (9,))]
    assert (scheduler.counts.draft_tokens, scheduler.counts.accepted_tokens) == (3, 1)
    scheduler.audit()


def test_a_stop_or_the_end_within_accepted_drafts_ends_the_row() -> None:
    for stop, most, wanted in (((8,), 20, ((7, 8), "stop")), ((), 3, ((7, 8), "length"))):
        scheduler = make_scheduler(drafts=3)
        scheduler.add(request("a", (5, 6, 7, 8, 5), max_tokens=most, stop=stop))
        answer(scheduler, scheduler.schedule(), 6)
        batch = scheduler.schedule()
        assert len(rows_of(batch)[0].draft_ids) == min(3, most - 2)  # a sampled token follows the last draft
        made = RowOutput((7, 8, 5, 1)[: len(rows_of(batch)[0].draft_ids) + 1])
        (output,) = updated(scheduler, batch, step_output([made]))
        assert (output.token_ids, output.finish_reason) == wanted
        assert not scheduler.has_work


def test_every_row_decodes_before_anyone_drafts_with_what_is_left() -> None:
    scheduler = make_scheduler(drafts=4, max_step_tokens=7)
    for name in "abc":
        scheduler.add(request(name, (1, 1), max_tokens=9))
    answer(scheduler, scheduler.schedule(), 1)
    assert shape(scheduler.schedule()) == [(0, 2, 5, True), (1, 2, 1, True), (2, 2, 1, True)]


def test_drafts_take_no_blocks_from_others() -> None:
    """Three blocks, two in use: the first drafts into the third, and nobody gives way for more."""
    scheduler = make_scheduler(drafts=4, num_blocks=4)
    scheduler.add(request("a", (1, 1, 1), max_tokens=5))
    scheduler.add(request("b", (2,), max_tokens=3))
    answer(scheduler, scheduler.schedule(), 1)
    assert shape(scheduler.schedule()) == [(0, 3, 3, True), (1, 1, 1, True)]
    assert scheduler.counts.num_preemptions == 0


def test_a_row_with_drafts_on_their_way_waits_for_them() -> None:
    scheduler = make_scheduler(drafts=2)
    scheduler.add(request("a", (1, 2, 1, 2, 1), max_tokens=9))
    answer(scheduler, scheduler.schedule(), 2)
    drafted = scheduler.schedule()
    assert rows_of(drafted)[0].draft_ids == (1, 2)
    assert rows_of(scheduler.schedule()) == ()
    updated(scheduler, drafted, step_output([RowOutput((1, 2, 1))]))
    assert rows_of(scheduler.schedule())[0].num_computed_tokens == 8


def test_nothing_is_drafted_after_a_token_that_is_not_known() -> None:
    scheduler = make_scheduler(drafts=2)
    scheduler.add(request("a", (1, 2, 1, 2, 1), max_tokens=9))
    scheduler.schedule()
    ahead = scheduler.schedule()
    assert [(row.token_ids, row.draft_ids) for row in rows_of(ahead)] == [((FROM_PREVIOUS_STEP,), ())]


def test_rows_that_sample_have_blocks_for_the_backends_drafts_if_any_are_free() -> None:
    """Blocks of 2 tokens, 5 of them: rows of 3 and of 1 token have 3, and two more for drafts of the first alone."""
    scheduler = make_scheduler(drafts=4, proposed=4, num_blocks=5)
    scheduler.add(request("a", (1, 2, 3), max_tokens=7))
    scheduler.add(request("b", (4,), max_tokens=7))
    batch = scheduler.schedule()
    assert [(row.num_context_tokens, row.lookahead) for row in rows_of(batch)] == [(3, 4), (1, 1)]
    drafts = ProposedDrafts(np.array([3, 0], np.int32), lambda: pytest.fail("nobody needs their ids"))
    output = step_output([RowOutput((9,)) for row in rows_of(batch)])
    updated(scheduler, batch, replace(output, drafts=drafts))
    batch = scheduler.schedule()
    proposed = PROPOSED, PROPOSED - 1, PROPOSED - 2
    assert [(row.token_ids, row.draft_ids) for row in rows_of(batch)] == [((9, *proposed), proposed), ((9,), ())]
    assert scheduler.counts.num_preemptions == 0
    updated(scheduler, batch, step_output([RowOutput((5, 8)[: row.num_tokens]) for row in rows_of(batch)]))
    assert (scheduler.counts.draft_tokens, scheduler.counts.accepted_tokens) == (3, 1)
    scheduler.audit()


def test_a_chunk_of_a_prompt_wants_no_drafts() -> None:
    scheduler = make_scheduler(drafts=2, proposed=2, max_step_tokens=4)
    scheduler.add(request("a", (1, 2, 3, 4, 5, 6), max_tokens=9))
    assert [(row.num_tokens, row.lookahead) for row in rows_of(scheduler.schedule())] == [(4, 0)]
    assert [(row.num_tokens, row.lookahead) for row in rows_of(scheduler.schedule())] == [(2, 2)]


def test_steps_stay_in_flight_where_no_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(drafts=2, proposed=2)
    scheduler.add(request("a", (1, 2), max_tokens=9))
    first = scheduler.schedule()
    assert scheduler.awaits(first)
    monkeypatch.setattr(DraftDepth, "pays", lambda *_: False)
    assert scheduler.awaits(first)  # for those of the text
    monkeypatch.setattr(DraftDepth, "is_off", lambda *_: True)
    assert not scheduler.awaits(first)
    assert [(row.token_ids, row.lookahead) for row in rows_of(scheduler.schedule())] == [((FROM_PREVIOUS_STEP,), 0)]


def test_rows_whose_drafts_are_wrong_are_asked_for_few_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with drafts that are all right, or never, one of each at a time; a token takes a fifth of a step."""
    scheduler, ids, now_s = make_scheduler(drafts=3, proposed=3), itertools.count(1), 0.0
    monkeypatch.setattr(scheduler, "_clock", lambda: now_s)
    drafted: dict[str, list[int]] = {"right": [], "wrong": []}
    for number in range(600):
        for name in drafted:
            if not any(each.startswith(name) for each in scheduler._open.requests):
                scheduler.add(request(f"{name} {number}", (next(ids),), max_tokens=90))
        batch, made = scheduler.schedule(), []
        for row in rows_of(batch):
            name = str(scheduler.request_of(row.sequence_id)).split()[0]
            drafted[name].append(row.num_drafts)
            made.append(RowOutput(tuple(itertools.islice(ids, 1 + row.num_drafts * (name == "right")))))
        now_s += 1.0 + 0.2 * batch.num_tokens
        wanted = np.array([row.lookahead for row in rows_of(batch)], np.int32)
        proposed = ProposedDrafts(wanted, lambda: pytest.fail("nobody needs their ids"))
        updated(scheduler, batch, replace(step_output(made), drafts=proposed))
        scheduler.take_closed_rows()
        scheduler.audit()
    right, wrong = (np.mean(each[-400:]) for each in drafted.values())
    assert right > 2.5
    assert wrong < 0.3


def test_drafts_of_the_text_go_on_where_the_backends_never_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text repeats, and the other does not; the backend's drafts are wrong, a token takes a fifth of a step, and a
    step that is awaited a tenth.
    """
    scheduler, ids, now_s = make_scheduler(drafts=3, proposed=3), itertools.count(100), 0.0
    monkeypatch.setattr(scheduler, "_clock", lambda: now_s)
    drafts: dict[str, list[int]] = {"copied": [], "new": []}
    wanted: list[int] = []
    in_flight: list[tuple[ScheduledBatch, StepOutput]] = []
    for number in range(600):
        for name in drafts:
            if not any(each.startswith(name) for each in scheduler._open.requests):
                scheduler.add(request(f"{name} {number}", (next(ids),), max_tokens=90))
        batch, made = scheduler.schedule(), []
        for row in rows_of(batch):
            name = str(scheduler.request_of(row.sequence_id)).split()[0]
            drafts[name].append(row.num_drafts)
            wanted.append(row.lookahead)
            right = row.num_drafts if row.draft_ids and min(row.draft_ids) >= 0 else 0
            first = row.num_computed_tokens + row.num_tokens - row.num_drafts
            copied = tuple((first + place) % 5 for place in range(1 + right))
            made.append(RowOutput(copied if name == "copied" else (next(ids),)))
        lookahead = np.array([row.lookahead for row in rows_of(batch)], np.int32)
        proposed = ProposedDrafts(lookahead, lambda: pytest.fail("nobody needs their ids"))
        if batch.num_rows:
            in_flight.append((batch, replace(step_output(made), drafts=proposed)))
        is_awaited = not batch.num_rows or scheduler.awaits(batch)
        now_s += 1.0 + 0.1 * is_awaited + 0.2 * batch.num_tokens
        while len(in_flight) > (not is_awaited):
            updated(scheduler, *in_flight.pop(0))
        scheduler.take_closed_rows()
        scheduler.audit()
    assert np.mean(drafts["copied"][-400:]) > 2
    assert np.mean(drafts["new"][-400:]) < 0.3
    assert np.mean(wanted[-400:]) < 0.3

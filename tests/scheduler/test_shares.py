"""What clients have of a step's rows and prompt tokens, on a machine whose step times are made up."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from realizar.batch import ScheduledBatch
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.request import Client
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.pace import Pace
from realizar.scheduler.row_table import Sequence
from scheduler.timed_runs import Run, ids

HONEST = tuple(Client(f"honest {number}") for number in range(4))
OTHER = Client("other")
WARM_S, SECONDS = 3.0, 4.0  # of the machine that is made up


def processor_s(batch: ScheduledBatch) -> float:
    """Steps whose time goes with their tokens."""
    return processor_s_of(batch.num_tokens)


def processor_s_of(num_tokens: int) -> float:
    return 2.8e-3 + 5.5e-4 * num_tokens


def gpu_s(batch: ScheduledBatch) -> float:
    """Steps whose time hardly grows with their tokens."""
    return 1e-2 + 2e-5 * batch.num_tokens


@dataclass
class Load:
    """Four clients who ask one thing after the other, beside a fifth.

    Attributes:
        first_s: from each request of the four to its first token.
        num_tokens: that they got. num_rows: of the steps.
    """

    run: Run
    kind: str
    first_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_rows: list[int] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    asked_s: dict[Client, tuple[str, float]] = field(default_factory=dict)

    def add_other(self) -> None:
        """Keep the fifth client as busy as it wants to be."""
        wanted, n, prompt, answer = {
            "honest": (1, 1, 100, 60),
            "n": (1, 64, 100, 2000),
            "streams": (60, 1, 100, 2000),
            "prompts": (6, 1, 4000, 1),
        }[self.kind]
        has = len({each.request.request_id for each in self.run.scheduler._open._sequences.values()
                   if each.request.client == OTHER})  # fmt: skip
        for _ in range(wanted - has):
            number = next(self.numbers)
            self.run.add(f"other {number}", ids(prompt, 10_000 + number), answer, client=OTHER, n=n)

    def step(self) -> None:
        self.add_other()
        for number, client in enumerate(HONEST):
            name, _ = self.asked_s.get(client, ("", 0.0))
            if not self.run.scheduler.is_open(name):
                if name:
                    times = self.run.tokens_s[name]
                    self.first_s.append(times[0] - self.asked_s[client][1])
                name = f"{client.name} {next(self.numbers)}"
                self.asked_s[client] = name, self.run.now_s
                self.run.add(name, ids(100, 100_000 + 1000 * number + next(self.numbers)), 60, client=client)
        names = [name for name, _ in self.asked_s.values()]
        before = sum(len(self.run.tokens_s[name]) for name in names)
        self.num_rows.append(len(self.run.step()))
        self.num_tokens += sum(len(self.run.tokens_s[name]) for name in names) - before


@functools.cache
def measured(kind: str, seconds: object) -> Load:
    load = Load(Run(Pace(2.5, 12), seconds, rows=64), kind)  # type: ignore[arg-type]
    while load.run.now_s < WARM_S:
        load.step()
    load.first_s, load.num_tokens, load.num_rows = [], 0, []
    while load.run.now_s < WARM_S + SECONDS:
        load.step()
    return load


@pytest.mark.parametrize("seconds", [processor_s, gpu_s])
@pytest.mark.parametrize("kind", ["n", "streams", "prompts"])
def test_four_clients_keep_their_speed_beside_one_who_wants_everything(kind: str, seconds: object) -> None:
    """Three fifths of what they have beside one more of their kind, and first tokens within three times."""
    least, found = measured("honest", seconds), measured(kind, seconds)
    assert found.num_tokens > 0.6 * least.num_tokens
    assert statistics.mean(found.first_s) < 3 * statistics.mean(least.first_s)
    if kind != "prompts" and seconds is gpu_s:  # where rows cost nothing, nobody has fewer
        assert statistics.median(found.num_rows) > 55


def test_a_lone_client_has_every_row() -> None:
    load = Load(Run(Pace(2.5, 12), processor_s, rows=64), "n")
    for _ in range(100):
        load.add_other()
        load.num_rows.append(len(load.run.step()))
    assert load.num_rows[-1] == 64


@pytest.mark.parametrize("shows", [False, True])
def test_images_hold_streams_of_others_to_half_as_long_again_from_the_first_on(shows: bool) -> None:
    run = Run(Pace(2.5, 12), processor_s, rows=64)
    for number in range(8):
        run.add(f"stream {number}", ids(5, number), client=HONEST[0])
    while len(run.tokens_s["stream 7"]) < 80:
        run.step()
    alone_s, lengths = processor_s_of(8), list[float]()
    image = (prompt_embeddings(np.ones((600, 4)), 20),) if shows else ()
    run.add("shown", ids(1000, 1000), 1, client=OTHER, embeddings=image)
    while not run.tokens_s["shown"]:
        before_s = run.now_s
        run.step()
        lengths.append(run.now_s - before_s)
    assert (max(lengths) > 1.7 * alone_s) is not shows


def test_rows_that_take_turns_all_go_on() -> None:
    run = Run(Pace(2.5, 12), processor_s, rows=32)
    for number in range(30):
        run.add(f"other {number}", ids(5, number), client=OTHER)
    while not run.tokens_s["other 29"]:
        run.step()
    run.add("alone", ids(5, 1000), client=HONEST[0])
    while len(run.tokens_s["alone"]) < 60:
        run.step()
    before = {name: len(times) for name, times in run.tokens_s.items()}
    num_rows = [len(run.step()) for _ in range(400)]
    gained = {name: len(times) - before[name] for name, times in run.tokens_s.items()}
    assert gained.pop("alone") == 400
    assert statistics.median(num_rows) < 8
    assert max(gained.values()) - min(gained.values()) <= 2
    assert min(gained.values()) > 20


def test_many_who_may_not_start_are_passed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step looks at one of a client's waiting sequences, and at one choice of a request, not at all of them."""
    looked_at: Counter[str] = Counter()
    plain = OpenSequences.waiting_in_turn

    def counting(self: OpenSequences, *passed_over: set[str]) -> Iterator[Sequence]:
        for sequence in plain(self, *passed_over):
            looked_at[sequence.request.client.name] += 1
            yield sequence

    monkeypatch.setattr(OpenSequences, "waiting_in_turn", counting)
    run = Run(Pace(2.5, 12), processor_s, rows=32)
    for number in range(300):
        run.add(f"other {number}", ids(5, number), 40, client=OTHER)
    while not run.tokens_s["other 20"]:
        run.step()
    run.add("alone", ids(5, 1000), client=HONEST[0])
    while run.scheduler._open.clients[OTHER.name].num_rows > 16:
        run.step()
    looked_at.clear()
    for _ in range(10):
        run.step()
    assert 10 <= looked_at[OTHER.name] <= 30
    run.scheduler.audit()


def test_choices_wait_for_the_first_one_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(None, rows=64)
    looked_for = 0
    plain = KVCacheManager.find_prefix

    def counting(self: KVCacheManager, *given: Any) -> Prefix:
        nonlocal looked_for
        looked_for += 1
        return plain(self, *given)

    monkeypatch.setattr(KVCacheManager, "find_prefix", counting)
    run.add("a", ids(2000, 1), 4, n=50)
    run.step()
    assert looked_for == 2, "the first choice, and the second one, which waits for it"
    while run.scheduler.has_work:
        run.step()
    assert len(run.tokens_s["a"]) == 50 * 4


def test_prompt_tokens_of_a_step_are_shared_by_client() -> None:
    """Many prompts of one and one of another: as many tokens of each; what one does not need goes to the other."""
    run = Run(None)
    a, b = Client("a"), Client("b", weight=3)
    for number in range(6):
        run.add(f"a {number}", ids(2000, number), 1, client=a)
    run.step()
    run.add("b", ids(600, 100), 1, client=b)
    found: list[Counter[str]] = []
    for _ in range(3):
        owners = {each.sequence_id: each.request.client.name for each in run.scheduler._open._sequences.values()}
        tokens: Counter[str] = Counter()
        for row in run.step():
            tokens[owners[row.sequence_id]] += row.num_tokens
        found.append(tokens)
    assert found == [{"a": 128, "b": 384}, {"a": 296, "b": 216}, {"a": 512}]


def test_a_client_takes_rows_back_up_to_its_share() -> None:
    run = Run(None, rows=8)
    for number in range(12):
        run.add(f"a {number}", ids(10, number), 400, client=Client("a"))
    for _ in range(5):
        run.step()
    for number in range(6):
        run.add(f"b {number}", ids(10, 100 + number), 400, client=Client("b"))
    for _ in range(5):
        run.step()
        run.scheduler.audit()
    assert {name: client.num_rows for name, client in run.scheduler._open.clients.items()} == {"a": 4, "b": 4}
    while run.scheduler.has_work:
        run.step()
    assert {name: len(times) for name, times in run.tokens_s.items()} == dict.fromkeys(run.tokens_s, 400)

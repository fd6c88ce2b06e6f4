"""The order in which sequences of several clients start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realizar.request import NO_CLIENT, Client
from realizar.scheduler.open_sequences import Turns
from realizar.scheduler.scheduler import Scheduler
from scheduler.scheduler_runs import answer, make_scheduler, request


def add(scheduler: Scheduler, client: Client, name: str, priority: int = 0) -> None:
    asked = request(f"{client.name}{name}", 2, max_tokens=1, priority=priority)
    scheduler.add(replace(asked, client=client))


def started(scheduler: Scheduler, count: int) -> list[str]:
    """The next requests that run, one after another."""
    names: list[str] = []
    while len(names) < count and scheduler.has_work:
        names += [output.request_id for output in answer(scheduler, scheduler.schedule())]
        scheduler.take_closed_rows()
        scheduler.audit()
    return names


A, B, C = (Client(name) for name in "abc")


def test_a_lone_client_is_served_in_the_order_of_arrival() -> None:
    scheduler = make_scheduler(max_running=1)
    names = [f"a{number}" for number in range(20)]
    for number in range(20):
        add(scheduler, A, f"{number}")
    assert started(scheduler, 20) == names


def test_whoever_comes_later_starts_in_turn() -> None:
    scheduler = make_scheduler(max_running=1)
    for number in range(8):
        add(scheduler, A, f"{number}")
    assert started(scheduler, 2) == ["a0", "a1"]
    for number in range(3):
        add(scheduler, B, f"{number}")
    add(scheduler, C, "0")
    assert started(scheduler, 10) == ["a2", "b0", "c0", "a3", "b1", "a4", "b2", "a5", "a6", "a7"]


def test_the_choices_of_one_request_take_a_turn_each() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(replace(request("many", 2, max_tokens=1, n=9), client=A))
    add(scheduler, B, "0")
    assert started(scheduler, 3).index("b0") == 1


def test_one_request_after_another_gets_no_more_than_a_queue() -> None:
    """A client that asks again when it has its answer has every second turn beside one whose requests wait."""
    scheduler = make_scheduler(max_running=1)
    for number in range(20):
        add(scheduler, A, f"{number}")
    names: list[str] = []
    for number in range(8):
        add(scheduler, B, f"{number}")
        while f"b{number}" not in names:
            names += started(scheduler, 1)
    assert names.count("b0") == 1
    assert 7 <= sum(name.startswith("a") for name in names) <= 9


def test_turns_follow_weights() -> None:
    scheduler = make_scheduler(max_running=1)
    heavy = Client("h", 3)
    for number in range(12):
        add(scheduler, A, f"{number}")
        add(scheduler, heavy, f"{number}")
    names = started(scheduler, 16)
    assert sum(name.startswith("h") for name in names) == 12
    assert all(2 <= "".join(names[at : at + 4]).count("h") <= 4 for at in range(0, 16, 4))


def test_a_client_gets_back_the_turns_that_it_did_not_use() -> None:
    scheduler = make_scheduler(max_running=1)
    for number in range(50):
        add(scheduler, A, f"{number}")
        add(scheduler, B, f"{number}")
    for number in range(50):
        scheduler.abort(f"a{number}")
    add(scheduler, A, "late")
    assert "alate" in started(scheduler, 2)


def test_a_client_that_gives_up_and_asks_again_keeps_its_share() -> None:
    """As one does whose requests have a time limit: it always waits for something, so that its turns never end."""
    scheduler = make_scheduler(max_running=1)
    for number in range(400):
        add(scheduler, B, f"{number}")
    names: list[str] = []
    asked = 0
    waiting: list[str] = []
    for _ in range(60):
        for name in waiting[:3]:
            scheduler.abort(name)
        waiting = waiting[3:]
        while len(waiting) < 5:
            add(scheduler, A, f"{asked}")
            waiting.append(f"a{asked}")
            asked += 1
        names += started(scheduler, 1)
        waiting = [name for name in waiting if name not in names]
    assert 25 <= sum(name.startswith("a") for name in names) <= 31


@pytest.mark.parametrize("priority", [-100, 3])
def test_nobody_else_waits_for_what_priority_moved(priority: int) -> None:
    """Sequences that start early or late don't move the turns of others."""
    scheduler = make_scheduler(max_running=1)
    add(scheduler, A, "moved", priority)
    for number in range(300):
        add(scheduler, A, f"{number}")
    started(scheduler, 4)
    add(scheduler, B, "0")
    assert "b0" in started(scheduler, 2)


def test_clients_that_are_new_each_time_keep_nobody_waiting() -> None:
    scheduler = make_scheduler(max_running=1)
    add(scheduler, A, "0")
    add(scheduler, A, "1")
    names: list[str] = []
    for number in range(200):
        add(scheduler, Client(f"n{number}."), "")
        names += started(scheduler, 1)
    assert names.index("a1") <= 5


def test_clients_of_the_past_are_forgotten() -> None:
    turns = Turns()
    turns.take(NO_CLIENT)
    for number in range(5000):
        client = Client(f"{number}")
        turns.start(client, turns.take(client))
        turns.take(Client("leaves"))
        turns.give_up(Client("leaves"))
    assert len(turns) == 1
    assert len(turns._next) + len(turns._used) < 300

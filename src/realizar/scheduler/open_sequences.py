"""`OpenSequences`: every sequence that has not ended, by request, whether it waits or runs, and in what order."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.kv_cache.block_keys import BlockKeys
from realizar.request import Client, Request
from realizar.scheduler.row_table import RowPool, Rows, RowTable, Sequence

_FEW = 64  # clients that are remembered in any case
_MOST_READ = 64.0  # steps that a client may read prompts beside decodes of others, beyond its share
_PAID_BACK = 1 / 3  # of a step, with every step

TURNS_PER_PRIORITY = 64
"""Later turns that a sequence lets pass for every step of priority between them."""


def order(sequence: Sequence) -> tuple[float, int]:
    """Sort key of admission, smallest first. Under pressure the largest running one is preempted.

    Clients' sequences start in turn, those of one turn in the order of arrival. Priority moves one by turns, so that
    a bounded number of later sequences overtake one that waits, however urgent they are.
    """
    return sequence.turn + TURNS_PER_PRIORITY * sequence.request.priority, sequence.sequence_id


class Turns:
    """Gives each sequence that begins to wait its turn; the smallest starts first.

    These are the start tags of fair queueing. A client's turns follow each other at a distance of 1 / weight, and the
    first one of a client who waited for nothing is now. Time passes by a round while every client who waits gets its
    weight of starts. So clients start in turn, however many sequences of one wait already.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}  # a client's turn after those that it has taken
        self._used: dict[str, float] = {}  # after as many as have started
        self._waiting: Counter[str] = Counter()
        self._weights: dict[str, int] = {}  # of those who wait
        self._most_known = _FEW

    def __len__(self) -> int:
        return self._waiting.total()

    def take(self, client: Client) -> float:
        name = client.name
        if len(self._next) > self._most_known:
            self._forget()
        following = self._next.get(name, self._now)
        # Behind as many as wait: those who left don't count, or whoever leaves and comes back would never start.
        behind = self._unused(name) + self._waiting[name] / client.weight
        turn = max(self._now, min(following, max(behind, following - 1 / client.weight)))
        self._next[name] = turn + 1 / client.weight
        self._waiting[name] += 1
        self._weights[name] = client.weight
        return turn

    def start(self, client: Client, turn: float) -> None:
        used = min(turn, self._unused(client.name)) + 1 / client.weight
        self._used[client.name] = max(self._used.get(client.name, 0.0), used)
        self._now += 1 / sum(self._weights.values())
        self._leave(client.name)

    def give_up(self, client: Client) -> None:
        """A sequence ended while it waited. A client who waits for nothing more gets the turns that it did not use."""
        self._leave(client.name)
        if client.name not in self._waiting:
            self._next[client.name] = self._used.get(client.name, self._now)

    def _unused(self, name: str) -> float:
        """The first turn that a client could have if it waited for nothing."""
        return max(self._used.get(name, self._now), self._now)

    def _leave(self, name: str) -> None:
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name], self._weights[name]

    def _forget(self) -> None:
        """Forget clients who have had no more than the others: their next turn is now in any case."""
        self._next = {name: turn for name, turn in self._next.items() if turn > self._now}
        self._used = {name: turn for name, turn in self._used.items() if turn > self._now}
        self._most_known = 2 * len(self._next) + _FEW


class ReadSteps:
    """How much longer each client has read prompts beside decodes of others than is its share, in steps.

    A step counts by the client's share of its prompt tokens. Every step takes back a third: a client whose prompts make
    steps two and a half times as long for ever is held to half as long again, and nobody is who reads now and then. Who
    shows images is held to it from the first on.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._read: dict[str, tuple[float, int]] = {}  # by client, after so many steps

    def note(self, prompts: Mapping[Sequence, int], *, is_much: bool) -> None:
        """Take in a step, with the tokens of its prompts; `is_much`: it was held to half as long again."""
        self._num_steps += 1
        total = sum(prompts.values())
        for sequence, count in prompts.items():
            name = sequence.request.client.name
            self._read[name] = self._now(name) + count / total * (_PAID_BACK if is_much else 1.0), self._num_steps
        if len(self._read) > _FEW:
            self._read = {name: read for name, read in self._read.items() if self._now(name)}

    def is_much(self, clients: Collection[str], showing: Container[str]) -> bool:
        """True if all of these clients, if there are any, have read for long, or are `showing` images."""
        return len(clients) > 0 and all(name in showing or self._now(name) >= _MOST_READ for name in clients)

    def _now(self, name: str) -> float:
        steps, then = self._read.get(name, (0.0, 0))
        return max(steps - _PAID_BACK * (self._num_steps - then), 0.0)


@dataclass(slots=True)
class ClientRows:
    """What a client has in the scheduler: open sequences, those of them that have a row, and the size of its share."""

    weight: int
    num_open: int = 0
    num_rows: int = 0


class OpenSequences:
    """Owns the lists; the scheduler decides which sequences move between them.

    Attributes:
        clients: those who have an open sequence, by name.
        waiting: by client's name, sorted by `order`, for those clients who have any; a preempted sequence waits.
        running: sorted by `order`.
        requests: by request id and choice.
        rows: the numbers of rows; a preempted sequence, which waits, keeps its own.
    """

    def __init__(self, block_size: int, table: RowTable) -> None:
        self._block_size, self._table = block_size, table
        self._ids: Iterator[int] = itertools.count()
        self._turns = Turns()
        self._sequences: dict[int, Sequence] = {}
        self.clients: dict[str, ClientRows] = {}
        self.requests: dict[str, dict[int, Sequence]] = {}
        self.waiting: dict[str, list[Sequence]] = {}
        self.running: list[Sequence] = []
        self.rows = RowPool(len(table.sequence_ids))
        self._num_chosen = 0
        self._running_rows: NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: int) -> Sequence | None:
        return self._sequences.get(sequence_id)

    @property
    def running_rows(self) -> NDArray[np.intp]:
        """intp [running], the rows of the running sequences in their order."""
        if self._running_rows is None:
            self._running_rows = np.array([sequence.row for sequence in self.running], np.intp)
        return self._running_rows

    def of_rows(self, rows: NDArray[np.intp]) -> list[Sequence]:
        """The sequences of those of the rows, intp [rows], that have one."""
        numbers = self._table.sequence_ids[rows].tolist()
        return [sequence for number in numbers if (sequence := self._sequences.get(number)) is not None]

    def showing(self, prompts: Iterable[Sequence]) -> set[str]:
        """Clients of whose images some are read by these prompts, or by the next one of those that wait."""
        next_ones = (queue[0] for queue in self.waiting.values())
        return {each.request.client.name for each in (*prompts, *next_ones) if each.request.embeddings}

    @property
    def num_queued_requests(self) -> int:
        waiting = itertools.chain.from_iterable(self.waiting.values())
        return len({sequence.request.request_id for sequence in waiting if sequence.row is None})

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def num_preempted(self) -> int:
        """Sequences that wait and have a row."""
        return sum(client.num_rows for client in self.clients.values()) - len(self.running)

    def add(self, request: Request, keys: BlockKeys | None = None) -> Collection[Sequence]:
        """Queue every choice of a request, or none if one of them can't be made. Returns their sequences.

        `keys` are the first one's, where those of the prompt were made already.
        """
        choices: dict[int, Sequence] = {}
        for choice in range(request.sampling.n):
            own = keys or BlockKeys(self._block_size, request.cache_salt, request.embeddings)
            choices[choice], keys = Sequence(next(self._ids), request, choice, own, self._table), None
        self.requests[request.request_id] = choices
        client = self.clients.setdefault(request.client.name, ClientRows(request.client.weight))
        client.num_open += len(choices)
        for sequence in choices.values():
            sequence.turn = self._turns.take(request.client)
            self._sequences[sequence.sequence_id] = sequence
            self._wait(sequence)
        return choices.values()

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting.setdefault(sequence.request.client.name, []), sequence, key=order)

    def _wait_no_more(self, sequence: Sequence) -> None:
        name = sequence.request.client.name
        waiting = self.waiting[name]
        del waiting[bisect.bisect_left(waiting, order(sequence), key=order)]
        if not waiting:
            del self.waiting[name]

    def start(self, sequence: Sequence) -> None:
        self._wait_no_more(sequence)
        self._table.is_running[sequence.own_row] = True
        self._running_rows = None
        bisect.insort(self.running, sequence, key=order)

    def stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._table.is_running[sequence.own_row] = False
        self._running_rows = None
        self._wait(sequence)

    def give_row(self, sequence: Sequence) -> None:
        """The caller has checked that a row is free."""
        if sequence.scheduled_s is None:
            self._turns.start(sequence.request.client, sequence.turn)
        self.clients[sequence.request.client.name].num_rows += 1
        sequence.take_row(self.rows.take())

    def take_row(self, sequence: Sequence) -> None:
        """Take the row from a sequence, which goes on from the tokens that are known; those in flight never come."""
        if sequence.row is not None:
            self.clients[sequence.request.client.name].num_rows -= 1
            self.rows.release(sequence.row)
            sequence.leave_row()

    def remove(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.running:
            self.running.remove(sequence)
            self._running_rows = None
        else:
            self._wait_no_more(sequence)
        self.take_row(sequence)
        if sequence.scheduled_s is None:
            self._turns.give_up(request.client)
        client = self.clients[request.client.name]
        client.num_open -= 1
        if not client.num_open:
            del self.clients[request.client.name]
        del self._sequences[sequence.sequence_id]
        choices = self.requests[request.request_id]
        del choices[sequence.choice]
        if not choices:
            del self.requests[request.request_id]

    def share(self, client: str) -> float:
        """The rows that a client may have for good, while all who have an open sequence want as many."""
        num_rows, clients = len(self._table.sequence_ids), self.clients
        return num_rows * clients[client].weight / sum(each.weight for each in clients.values())

    def has_share(self, client: str) -> bool:
        return len(self.clients) > 1 and self.clients[client].num_rows >= self.share(client)

    def waiting_in_turn(self, passed_over: Container[str] = ()) -> Iterator[Sequence]:
        """Those that wait now, in their order, the ones of clients who have their share of rows behind all others; no
        further one of a client who comes to be `passed_over` meanwhile.
        """

        def not_passed_over(sequence: Sequence) -> bool:
            return sequence.request.client.name not in passed_over

        queues = {name: itertools.takewhile(not_passed_over, list(queue)) for name, queue in self.waiting.items()}
        have_share = {name for name in queues if self.has_share(name)}
        for names in (queues.keys() - have_share, have_share):
            yield from heapq.merge(*(queues[name] for name in names), key=order)

    def last_of_most(self, *, loses_nothing: bool = False) -> Sequence | None:
        """The last running sequence of the client that has most rows beyond its share, if that is a row or more; with
        `loses_nothing`, one that can start again without the loss of a sampler's state, prompt scores or a mean.
        """
        beyond = {name: each.num_rows - self.share(name) for name, each in self.clients.items()}
        most = max(beyond, key=beyond.__getitem__, default="")
        if beyond.get(most, 0.0) < 1.0 or len(beyond) < 2:
            return None
        for sequence in reversed(self.running):
            request, sampling = sequence.request, sequence.request.sampling
            keeps_nothing = not sampling.mirostat and sampling.prompt_logprobs is None and request.pooling is None
            if request.client.name == most and (keeps_nothing or not loses_nothing):
                return sequence
        return None

    @property
    def num_equal_rows(self) -> int:
        """Rows that clients would have if none had more than one in their middle, by weight."""
        clients = [each for each in self.clients.values() if each.num_rows]
        each_has = sorted(client.num_rows / client.weight for client in clients)
        middle = each_has[(len(each_has) - 1) // 2] if each_has else 0.0
        return sum(min(client.num_rows, math.ceil(middle * client.weight)) for client in clients)

    def in_turn(self, rows: Rows, most: int) -> Rows:
        """As many of the rows, intp [rows], of each client as it has and others may have, in their order, in turn."""
        taken: Counter[str] = Counter()
        turns = np.zeros(len(rows))
        oldest = np.argsort(self._table.chosen[rows], kind="stable")
        for index, sequence in zip(oldest.tolist(), self.of_rows(rows[oldest]), strict=True):
            client = sequence.request.client
            taken[client.name] += 1
            turns[index] = taken[client.name] / client.weight
        chosen = oldest[np.argsort(turns[oldest], kind="stable")[:most]]
        self._table.chosen[rows[chosen]] = self._num_chosen + np.arange(len(chosen))
        self._num_chosen += len(chosen)
        return rows[np.sort(chosen)]

    def audit(self) -> None:
        """Prove that every sequence is in the list and in the row where it belongs. RuntimeError: one is not."""
        sequences, waiting = self._sequences.values(), list(itertools.chain.from_iterable(self.waiting.values()))
        if not all(each.running for each in self.running) or any(each.running for each in waiting):
            raise RuntimeError("a sequence is in the wrong list")
        for listed in (self.running, *self.waiting.values()):
            if sorted(listed, key=order) != listed:
                raise RuntimeError("a list of sequences is out of order")
        ids = sorted(sequence.sequence_id for sequence in (*self.running, *waiting))
        by_request = [sequence.sequence_id for choices in self.requests.values() for sequence in choices.values()]
        if ids != sorted(self._sequences) or ids != sorted(by_request):
            raise RuntimeError("a sequence is lost or listed twice")
        if len(self._turns) != sum(sequence.scheduled_s is None for sequence in waiting):
            raise RuntimeError("a sequence has used its turn and waits, or has started without one")
        if self.running_rows.tolist() != [sequence.row for sequence in self.running]:
            raise RuntimeError("the rows of running sequences are not those of the list")
        in_rows = {each.row: each for each in sequences if each.row is not None}
        numbers = {row: number for row, number in enumerate(self._table.sequence_ids.tolist()) if number >= 0}
        if numbers != {row: each.sequence_id for row, each in in_rows.items()}:
            raise RuntimeError("a row is not that of its sequence")
        self.rows.audit(in_rows)
        num_open = Counter(each.request.client.name for each in sequences)
        num_rows = Counter(each.request.client.name for each in in_rows.values())
        if {name: (client.num_open, client.num_rows) for name, client in self.clients.items()} != {
            name: (count, num_rows[name]) for name, count in num_open.items()
        }:
            raise RuntimeError("clients and their sequences or rows disagree")

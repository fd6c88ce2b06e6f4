"""`GrammarProcess` runs in the process of one grammar: it compiles the grammar, then follows its rows."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher, only_id
from realizar.structured.grammar_tokens import Encode as TokenizerEncode
from realizar.structured.grammar_tokens import EncodeSource
from realizar.structured.known_states import UNKNOWN, KnownStates
from realizar.structured.regex_masks import RegexMasks
from realizar.structured.regex_states import MOST_STATES
from realizar.structured.workers.bell import Listener
from realizar.structured.workers.channel import Channel, ChannelError
from realizar.structured.workers.mask_memory import (
    ENDED,
    GOES_ON,
    MOST_TOKENS,
    STUCK,
    MaskMemory,
    entries_of,
    fence,
)
from realizar.structured.workers.messages import (
    Compile,
    Done,
    Encode,
    Encoded,
    Follow,
    Leave,
    Lines,
    Refused,
    Slow,
    Stuck,
    ToWorker,
    Used,
    WantLines,
)
from realizar.structured.workers.process_limits import limit_process, within

_ENCODED_TEXTS = 1024
_FEW_ANSWERS = 200  # before more is found out than is asked, which takes as long as some hundred of them
_NEWS_BYTES = 1 << 20  # of memory, which the engine's process is told


class TextEncoder:
    """Encodes text, by itself or with the tokenizer in the engine's process. llguidance may call it from any thread.

    Args:
        source: makes the tokenizer's function here; where that fails, the engine's process is asked.
    """

    def __init__(self, source: EncodeSource | None) -> None:
        self._encode = None if source is None else _loaded(source)
        self._channel: Channel[ToWorker] | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Sequence[int] | None] = OrderedDict()
        self._others: deque[ToWorker] = deque()

    def connect(self, channel: Channel[ToWorker], others: deque[ToWorker]) -> None:
        """Use this channel from now on; messages that come before an answer are appended to `others`."""
        self._channel, self._others = channel, others
        self._known.clear()

    def __call__(self, text: str) -> Sequence[int] | None:
        """The ids of a text; None if the tokenizer is not available."""
        with self._lock:
            if text not in self._known:
                self._known[text] = self._ask(text) if self._encode is None else self._own(self._encode, text)
                if len(self._known) > _ENCODED_TEXTS:
                    self._known.popitem(last=False)
            return self._known[text]

    def _own(self, encode: TokenizerEncode, text: str) -> Sequence[int] | None:
        try:
            return encode(text)
        except BaseException:  # noqa: BLE001 - a panic of the tokenizers library is not an Exception
            return None

    def _ask(self, text: str) -> Sequence[int] | None:
        if self._channel is None:
            return None
        self._channel.send(Encode(text))
        while not isinstance(answer := self._channel.receive(), Encoded):
            self._others.append(answer)
        return answer.token_ids


def _loaded(source: EncodeSource) -> TokenizerEncode | None:
    try:
        return source.load()
    except Exception:  # noqa: BLE001 - a file that is gone, or anything else: the engine's process has it
        return None


@dataclass(eq=False, slots=True)
class _Row:
    """A row that is followed here.

    Attributes:
        slot: its slot in the shared memory.
        matcher: its state in the grammar, after `ahead`.
        ahead: tokens that were taken in before they were chosen, as the grammar allows no others.
        mask: the mask after those, uint32 [words]; None where it was not computed yet.
        next_id: the only id that it allows; None where there are several.
        number: of its last question.
        last_s: seconds that its last answer took.
        is_certain: its last answer left one token, and those after it have not been looked for.
    """

    slot: int
    matcher: GrammarMatcher
    ahead: deque[int] = field(default_factory=deque)
    mask: NDArray[np.uint32] | None = None
    next_id: int | None = None
    number: int = 0
    last_s: float = 0.0
    is_certain: bool = False

    def take_in(self, token_ids: Sequence[int]) -> None:
        """Take in chosen ids, of which the first may be ahead."""
        while self.ahead and token_ids:
            if token_ids[0] != self.ahead.popleft():
                self.matcher.error = "a token is not the one that the grammar allows"
                self.ahead.clear()
            token_ids = token_ids[1:]
        if token_ids:
            _advance(self.matcher, token_ids)
            self.mask = self.next_id = None


class GrammarProcess:
    """One grammar and its rows. The process ends when the engine closes the channel.

    Args:
        channel: channel to the engine's process.
        bell: its bell's descriptor; see `Listener`.
        factory, encoder: made by the fork server.
        memory: the shared memory.
        memory_bytes: memory that may be allocated in addition to the memory at the start.
    """

    def __init__(
        self, channel: Channel[ToWorker], bell: int, factory: GrammarFactory, encoder: TextEncoder, memory: MaskMemory,
        memory_bytes: int,
    ) -> None:  # fmt: skip
        self._channel, self._factory, self._memory = channel, factory, memory
        self._listener = Listener(bell, channel.fileno())
        self._inbox: deque[ToWorker] = deque()
        encoder.connect(channel, self._inbox)
        self._rows: dict[int, _Row] = {}
        self._states: KnownStates | None = None
        self._search: Iterator[None] = iter(())
        self._num_answers = self._first_line = 0
        self._next_wish = _FEW_ANSWERS
        self._num_slow = self._reported_bytes = 0
        self._first_bytes = _most_resident_bytes()
        limit_process(memory_bytes)

    def run(self) -> None:
        """Compile the grammar of the first command, and follow its rows."""
        try:
            command = self._channel.receive()
            if not isinstance(command, Compile):
                return
            grammar = self._compile(command)
            while grammar is not None:
                self._listener.wait()
                self._take_in(grammar)
                while self._answer_all(command) or self._go_ahead() or self._explore(grammar):
                    self._take_in(grammar)
        except ChannelError:
            pass  # the engine has closed its end

    def _compile(self, command: Compile) -> Grammar | None:
        _limit_cpu(command.cpu_s)
        try:
            grammar = self._factory.compile(StructuredOutput(command.kind, command.value))  # type: ignore[arg-type]
        except RealizarError as error:
            self._channel.send(Refused(str(error)))
            return None
        _limit_cpu(None)
        self._reported_bytes = self._taken_bytes()
        self._channel.send(Done(self._reported_bytes))
        return grammar

    def _take_in(self, grammar: Grammar) -> None:
        """Take in the messages that have come."""
        while (record := self._channel.receive_now()) is not None:
            self._inbox.append(record)
        while self._inbox:
            record = self._inbox.popleft()
            if isinstance(record, Follow):
                row = self._rows[record.key] = _Row(record.slot, grammar.start())
                _advance(row.matcher, record.token_ids)
            elif isinstance(record, Leave):
                self._leave(record.key)
            elif isinstance(record, Lines):
                self._begin_search(grammar, record.first)
        self._listener.listen(bool(self._rows))

    def _leave(self, key: int) -> None:
        """Forget a row. If it has a question, that is answered with what is there: nobody reads it."""
        row, memory = self._rows.pop(key, None), self._memory
        if row is None:
            return
        asked, answered = memory.asked[row.slot], memory.answered[row.slot]
        fence()
        if memory.keys[row.slot] == key and asked != answered:  # else the slot may be another row's at any time
            memory.answered[row.slot] = asked

    def _answer_all(self, command: Compile) -> int:
        """Answer the questions of all rows that have one; returns how many."""
        memory, started_s, num_answers = self._memory, time.perf_counter(), 0
        asking = [
            (row.last_s, key, row)
            for key, row in self._rows.items()
            if memory.asked[row.slot] != memory.answered[row.slot] and memory.keys[row.slot] == key
        ]
        for _, key, row in sorted(asking, key=itemgetter(0)):  # what took long takes long again: others wait
            before_s = time.perf_counter()
            self._answer(key, row)
            row.last_s = time.perf_counter() - before_s
            num_answers += 1
        self._num_answers += num_answers
        if num_answers > 1 and time.perf_counter() - started_s >= command.slow_s:
            self._num_slow += 1
            if self._num_slow == command.slow_answers:
                self._num_slow = 0
                self._channel.send(Slow())
        if num_answers and (taken := self._taken_bytes()) >= self._reported_bytes + _NEWS_BYTES:
            self._reported_bytes = taken
            self._channel.send(Used(taken))
        return num_answers

    def _answer(self, key: int, row: _Row) -> None:
        """Compute the masks that a row is asked for."""
        memory, slot, matcher = self._memory, row.slot, row.matcher
        number = memory.asked[slot]
        fence()
        if memory.keys[slot] != key:
            return  # the slot is another row's
        row.number = int(number)
        if (num_tokens := int(memory.num_tokens[slot])) > 0:
            row.take_in(memory.tokens[slot, :num_tokens].tolist())
        if (num_drafts := int(memory.num_drafts[slot])) > 0:
            masks = np.empty((num_drafts + 1, self._factory.num_words), np.uint32)
            self._factory.fill(matcher, memory.drafts[slot, :num_drafts].tolist(), masks)
            memory.masks[slot], memory.masks_after_drafts[slot, :num_drafts] = masks[0], masks[1:]
        else:
            self._write_mask(row)
        row.is_certain = memory.most_drafts > 0 and only_id(memory.masks[slot]) is not None
        state = GOES_ON
        if not row.ahead:
            state = STUCK if matcher.error is not None else ENDED if matcher.ended else GOES_ON
        if state == STUCK:
            self._channel.send(Stuck(key, str(matcher.error)))
        memory.states[slot] = state
        known = UNKNOWN if self._states is None or row.ahead else self._states.find(matcher)
        memory.known[slot] = 0 if known == UNKNOWN else entries_of(row.number, self._first_line + known)
        fence()
        memory.answered[slot] = number

    def _write_mask(self, row: _Row) -> None:
        """Write the mask of a row's next choice, and the tokens that are certain from there on."""
        memory, slot = self._memory, row.slot
        if row.ahead:
            memory.masks[slot] = 0
            memory.masks[slot, row.ahead[0] >> 5] = 1 << (row.ahead[0] & 31)
        elif row.mask is not None:
            memory.masks[slot] = row.mask
        else:
            self._factory.fill(row.matcher, (), memory.masks[slot : slot + 1])
            row.next_id = self._certain(row, memory.masks[slot])
        forced = [*row.ahead] if row.next_id is None else [*row.ahead, row.next_id]
        memory.forced[slot, : len(forced)] = entries_of(row.number, np.array(forced, np.int64))

    def _certain(self, row: _Row, mask: NDArray[np.uint32]) -> int | None:
        """The id that a row's mask allows if there is only one, and rows need not be taken back for drafts."""
        if self._memory.most_drafts or row.matcher.ended or row.matcher.error is not None:
            return None
        return only_id(mask)

    def _go_ahead(self) -> int:
        """Take in one more token of each row that has no choice, up to the end of its output; returns how many."""
        if self._memory.most_drafts:
            return self._look_ahead()
        memory, num_taken = self._memory, 0
        for row in self._rows.values():
            token_id = row.next_id
            if token_id is None or token_id in self._factory.end_ids or len(row.ahead) >= MOST_TOKENS - 2:
                continue
            num_taken += 1
            row.matcher.advance((token_id,))
            row.ahead.append(token_id)
            if row.mask is None:
                row.mask = np.empty(self._factory.num_words, np.uint32)
            self._factory.fill(row.matcher, (), row.mask.reshape(1, -1))
            row.next_id = self._certain(row, row.mask)
            if row.next_id is not None:
                memory.forced[row.slot, len(row.ahead)] = entries_of(row.number, row.next_id)
        return num_taken

    def _look_ahead(self) -> int:
        """Write the certain tokens of one row, which takes none in, as drafts may be others; returns how many rows."""
        row = next((each for each in self._rows.values() if each.is_certain), None)
        if row is None:
            return 0
        row.is_certain = False
        found = self._factory.certain_ids(row.matcher, min(self._memory.most_drafts + 1, MOST_TOKENS))
        self._memory.forced[row.slot, : len(found)] = entries_of(row.number, np.array(found, np.int64))
        return 1

    def _begin_search(self, grammar: Grammar, first_line: int) -> None:
        """Look for the grammar's states from now on, which have these lines of the shared memory."""
        if self._states is None:
            lines, memory = slice(first_line, first_line + MOST_STATES), self._memory
            masks = memory.masks[memory.num_slots :][lines]
            self._states = KnownStates(grammar, self._factory, masks, memory.after[lines])
            self._first_line, self._search = first_line, self._states.explore()

    def _explore(self, grammar: Grammar) -> bool:
        """Find out, one part of the work, what rows will need; true if there may be more."""
        if self._states is not None:
            return next(self._search, self) is not self
        if self._num_answers >= self._next_wish:
            self._next_wish = self._num_answers + _FEW_ANSWERS  # all lines may be others' now, and free later
            if isinstance(grammar.shared, RegexMasks) and len(self._memory.after):
                self._channel.send(WantLines())
        return False

    def _taken_bytes(self) -> int:
        return _most_resident_bytes() - self._first_bytes


def _advance(matcher: GrammarMatcher, token_ids: Sequence[int]) -> None:
    """Take in chosen ids up to the end of the output; others may have been chosen before that was known."""
    for token_id in token_ids:
        if not matcher.ended:
            matcher.advance((token_id,))


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limit_cpu(cpu_s: int | None) -> None:
    """Have the kernel end this process after `cpu_s` more seconds of processor time; None removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = hard
    if cpu_s is not None:
        soft = within(int(sum(os.times()[:2])) + cpu_s, hard)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

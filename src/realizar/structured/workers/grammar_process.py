"""`GrammarProcess` runs in the process of one grammar: it compiles the grammar, then follows its rows."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from realizar.errors import RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher
from realizar.structured.grammar_tokens import Encode as TokenizerEncode
from realizar.structured.grammar_tokens import EncodeSource
from realizar.structured.workers.channel import Channel, ChannelError
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.messages import Compile, Done, Encode, Encoded, Refused, Step, Stepped, ToWorker

_ENCODED_TEXTS = 1024


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

    def connect(self, channel: Channel[ToWorker]) -> None:
        """Use this channel from now on."""
        self._channel = channel
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
        answer = self._channel.receive()
        return answer.token_ids if isinstance(answer, Encoded) else None


def _loaded(source: EncodeSource) -> TokenizerEncode | None:
    try:
        return source.load()
    except Exception:  # noqa: BLE001 - a file that is gone, or anything else: the engine's process has it
        return None


class GrammarProcess:
    """One grammar and its rows. The process ends when the engine closes the channel.

    Args:
        channel: channel to the engine's process.
        factory: made by the fork server.
        masks: the shared memory.
        memory_bytes: memory that may be allocated in addition to the memory at the start.
    """

    def __init__(
        self, channel: Channel[ToWorker], factory: GrammarFactory, masks: MaskMemory, memory_bytes: int
    ) -> None:
        self._channel, self._factory, self._masks = channel, factory, masks
        self._rows: dict[int, GrammarMatcher] = {}
        self._first_bytes = _most_resident_bytes()
        _limit(memory_bytes)

    def run(self) -> None:
        """Compile the grammar of the first command, and follow its rows."""
        try:
            command = self._channel.receive()
            if not isinstance(command, Compile):
                return
            grammar = self._compile(command)
            while grammar is not None:
                step = self._channel.receive()
                if not isinstance(step, Step):
                    return
                self._channel.send(self._step(grammar, step))
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
        self._channel.send(Done(self._taken_bytes()))
        return grammar

    def _step(self, grammar: Grammar, step: Step) -> Stepped:
        started_s = time.perf_counter()
        for key in step.closed:
            self._rows.pop(key, None)
        for row in step.rows:
            if row.starts:
                self._rows[row.key] = grammar.start(row.token_ids)
            elif row.token_ids and not self._rows[row.key].ended:
                self._rows[row.key].advance(row.token_ids)
        self._masks.map(step.memory_bytes)
        for row in step.rows:
            out = self._masks.words(row.place, len(row.draft_ids) + 1, self._factory.num_words)
            self._factory.fill(self._rows[row.key], row.draft_ids, out)
        return Stepped(
            {row.key: error for row in step.rows if (error := self._rows[row.key].error) is not None},
            tuple(row.key for row in step.rows if self._rows[row.key].ended),
            self._taken_bytes(),
            time.perf_counter() - started_s,
        )

    def _taken_bytes(self) -> int:
        return _most_resident_bytes() - self._first_bytes


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limit(memory_bytes: int) -> None:
    """Bound the memory, disable core files, and close the output, as a library's panic would quote a user's text."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # systems without /proc have no such limit either
        data_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        most = _within(data_pages * resource.getpagesize() + memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _limit_cpu(cpu_s: int | None) -> None:
    """Have the kernel end this process after `cpu_s` more seconds of processor time; None removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = hard
    if cpu_s is not None:
        soft = _within(int(sum(os.times()[:2])) + cpu_s, hard)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _within(wanted: int, hard: int) -> int:
    """The largest allowed limit up to `wanted`; a hard limit of -1 is none."""
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)

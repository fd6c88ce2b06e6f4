"""Steps as device graphs, one per kind: captured once at load, replayed with one call."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain

import torch

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernels.ahead import PlannedCompiles
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.shapes import FIRST_ROWS, least_holding, padded_rows
from realizar.backends.cuda.workspace import Workspace

_LOG = logging.getLogger(__name__)
_NOTHING = StepKind(0)
_FEW_TOKENS = 64


class GraphRunner:
    """Owns the graphs of a loaded model.

    A graph of decodes holds body and tail for n rows of one token each, all of which may be sampled. A graph of a
    step with chunks holds the body alone, as how many rows are sampled varies; then comes a graph of the tail for so
    many. All read positions, lengths, block tables, tiles and the last tokens on the device,
    so that replaying one needs only the step's arrays. They run on the multiprocessors of `stream`, by default on all.
    A step of single tokens that adds features of images is launched one by one, so that they cost decodes nothing.
    """

    def __init__(
        self, body: Sequence[Launch], tail: Sequence[Launch], workspace: Workspace, device: DeviceProfile,
        stream: torch.cuda.Stream | None = None, compiles: PlannedCompiles | None = None,
    ) -> None:  # fmt: skip
        self._compiles = compiles
        self._body, self._tail, self._space, self._device = body, tail, workspace, device
        self._stream = stream
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._later: dict[StepKind, None] = {}  # in order
        self._asked: dict[StepKind, None] = {}  # of these, what steps have run as meanwhile
        self._warmed_later: Iterator[StepKind] = iter(())
        self._to_warm: StepKind | None = None

    def padded(self, chunks: StepKind) -> StepKind:
        """The kind that a step with chunks, padded, runs as: that of the smallest graph with room, or its own.

        One that is to be captured counts as if it were, so that a step computes the same before and after.
        """
        return least_holding(chunks, [*self._graphs, *self._later]) or chunks

    def run(self, kind: StepKind, selected: int) -> None:
        """Run a step and the logits of `selected` tokens, by the kind's graph if it has one, else launch by launch."""
        rows = padded_rows(selected, self._space.arrays.sizes.selected)
        if kind.embeds:
            self._space.place_given()
            kind = replace(kind, embeds=False)
        if not kind.tiles and self._space.arrays.brings_features:
            self.run_eagerly(kind, rows)
        elif kind.tiles and self.replay(kind):
            if rows and not self.replay(tail_kind(rows)):
                self.run_eagerly(_NOTHING, rows)
        elif kind.tiles or not 0 < selected <= kind.tokens or not self.replay(kind):
            self.run_eagerly(kind, rows)

    def run_eagerly(self, body: StepKind, selected: int) -> None:
        """Start all launches one by one; the logits of `selected` tokens, padded, or of none."""
        for launch, kind in self.launches(body, selected):
            launch.run(kind)

    def warm(self, kind: StepKind) -> None:
        """Start all launches of a kind one by one, once what is compiled of it beside the load is there."""
        if self._compiles is not None:
            self._compiles.await_kind(kind)
        self._run_whole(kind)

    def _run_whole(self, kind: StepKind) -> None:
        is_tail = not (kind.tiles or kind.decodes)
        self.run_eagerly(_NOTHING if is_tail else kind, 0 if kind.tiles else kind.tokens)

    def launches(self, body: StepKind, selected: int) -> list[tuple[Launch, StepKind]]:
        """The launches of `run_eagerly`, in order, each with its kind."""
        given = [(Launch("given embeddings", lambda _kind: self._space.place_given()), body)] if body.embeds else []
        body = replace(body, embeds=False)
        of_body = [(launch, body) for launch in self._body] if body.tokens else []
        of_tail = [(launch, StepKind(selected)) for launch in self._tail] if selected else []
        return given + of_body + of_tail

    def replay(self, kind: StepKind) -> bool:
        """Start the graph of a kind; False where there is none."""
        graph = self._graphs.get(kind)
        if graph is None:
            if kind in self._later:
                self._asked[kind] = None
            return False
        graph.replay()
        return True

    def prepare(self, kinds: Sequence[StepKind], progress: Callable[[float], None], *, capture: bool = True) -> None:
        """Compile and warm every kind, then capture it, if asked; a warning names those without a graph.

        Decodes come first, as they have most to lose where memory does not suffice, and of each sort the largest:
        others reuse its memory. Raises DeviceLostError where the device failed, not the capture.
        """
        if not self._device.is_gpu:
            return
        self._space.arrays.clear()
        ordered, failed = _in_order(kinds), dict[StepKind, str]()
        for done, kind in enumerate(ordered):
            if self._compiles is not None:
                self._compiles.await_kind(kind)
            if (reason := self._prepare(kind, capture=capture)) is not None:
                failed[kind] = reason
            progress((done + 1) / len(ordered))
        if capture and not failed:
            try:
                self._space.arrays.capture(self._recorder)
            except Exception as error:  # noqa: BLE001 - raised again where the device failed
                _LOG.warning("a step's arrays are sent without a graph: %s", failure_of(error))
        for kind, reason in failed.items():
            _LOG.debug("%s have no graph: %s", _described(kind), reason)
        if failed:
            _LOG.warning("%s run without a graph: %s", "; ".join(map(_described, failed)), next(iter(failed.values())))
        _LOG.info("%d of %d kinds of steps have a graph", len(self._graphs), len(ordered))

    def leave(self, kinds: Sequence[StepKind], chunks: Iterable[StepKind], *, capture: bool) -> list[StepKind]:
        """Leave kinds to `prepare_next`, and then `chunks`, which are only warmed; returns those of the first requests.

        Without `capture` all are only warmed.
        """
        later = _in_order(kind for kind in kinds if kind.tokens > FIRST_ROWS or kind.tiles)
        self._later = dict.fromkeys(later if capture else ())
        self._warmed_later = chain(() if capture else later, chunks)
        return [kind for kind in kinds if kind.tokens <= FIRST_ROWS and not kind.tiles]

    @property
    def asks(self) -> bool:
        """True if steps have run launch by launch as a kind that is to be captured."""
        return bool(self._asked)

    def prepare_next(self, *, asked: bool) -> bool:
        """Prepare a kind more, while no step runs: one that was asked for, or if not `asked` any that is compiled.

        False where no more are left. Raises DeviceLostError as `prepare`.
        """
        kind = next(iter(self._asked), None)
        if kind is not None:
            self._capture_later(kind, has_run=kind.tiles > 0)  # of decodes, perhaps the tail of fewer rows has
        elif not asked and self._later:
            kind = next(filter(self._is_compiled, self._later), None)
            if kind is not None:
                self._capture_later(kind)
        elif asked or not self._warm_next():
            return False
        return True

    def _capture_later(self, kind: StepKind, *, has_run: bool = False) -> None:
        self._later.pop(kind)  # before it can fail, so that it is tried once
        self._asked.pop(kind, None)
        self._space.arrays.clear()
        reason = self._prepare(kind, has_run=has_run)
        if reason is not None:
            _LOG.warning("%s run without a graph: %s", _described(kind), reason)
        if not self._later:
            _LOG.info("%d kinds of steps have a graph", len(self._graphs))

    def _warm_next(self) -> bool:
        """Warm one of the last kinds, once it is compiled; False where none is left."""
        if self._to_warm is None:
            self._to_warm = next(self._warmed_later, None)
        kind = self._to_warm
        if kind is not None and self._is_compiled(kind):
            self._to_warm = None
            self._space.arrays.clear()
            self.warm(kind)
        return kind is not None

    def _is_compiled(self, kind: StepKind) -> bool:
        return self._compiles is None or self._compiles.is_compiled(kind)

    def _prepare(self, kind: StepKind, *, capture: bool = True, has_run: bool = False) -> str | None:
        """Warm a kind unless it has run, and capture it if asked, while arrays are clear; why that failed, or None."""
        run = partial(self._run_whole, kind)
        if not has_run:
            run()
        torch.cuda.synchronize(self._device.torch_device)
        if self._stream is not None:
            self._stream.synchronize()  # the device does not wait for what has a context of its own
        if not capture:
            return None
        try:
            self._graphs[kind] = self._recorder.record(run)
        except Exception as error:  # noqa: BLE001 - raised again where the device failed
            return failure_of(error)
        return None

    @cached_property
    def _recorder(self) -> GraphRecorder:
        return GraphRecorder(self._device.torch_device, self._stream)

    def close(self) -> None:
        self._graphs.clear()
        self._later.clear()
        if self._compiles is not None:
            self._compiles.close()
        self._space.arrays.release()


class SmallGraphs:
    """Launches beside a step's, by the number of their tokens; of few tokens they are a graph."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, tokens: int) -> None:
        graph = self._graphs.get(tokens)
        if graph is None:
            self._launch(tokens)
        else:
            graph.replay()

    def prepare(self, counts: Iterable[int], device: DeviceProfile, *, capture: bool) -> None:
        """Compile what is launched for each number of tokens, and capture it where they are few, if asked."""
        if not self._launches:
            return
        numbers = sorted(counts)
        for tokens in numbers:
            self._launch(tokens)
        recorder = GraphRecorder(device.torch_device)
        for tokens in numbers if capture else ():
            if tokens <= _FEW_TOKENS:
                try:
                    self._graphs[tokens] = recorder.record(partial(self._launch, tokens))
                except Exception as error:  # noqa: BLE001 - raised again where the device failed
                    _LOG.warning(
                        "%d tokens of a drafter's states are made without a graph: %s", tokens, failure_of(error)
                    )

    def close(self) -> None:
        self._graphs.clear()

    def _launch(self, tokens: int) -> None:
        for launch in self._launches:
            launch.run(StepKind(tokens))


def _in_order(kinds: Iterable[StepKind]) -> list[StepKind]:
    return sorted(kinds, key=lambda kind: (kind.tiles > 0, -kind.tokens, -kind.decodes))


def tail_kind(selected: int) -> StepKind:
    """The kind of the tail alone, for so many tokens whose logits are wanted."""
    return StepKind(selected)


class AsideReader:
    """Chunks of prompts beside steps, on a stream of their own and in memory of their own.

    Args:
        graphs: over `space`, recorded for `stream`. Each chunk runs as the largest step that there is room for.
    """

    def __init__(self, graphs: GraphRunner, space: Workspace, stream: torch.cuda.Stream) -> None:
        self._graphs, self._space, self._stream = graphs, space, stream
        sizes = space.arrays.sizes
        self._kind = StepKind(sizes.tokens, 0, sizes.tiles)
        self._ends: deque[torch.cuda.Event] = deque()

    @property
    def tokens(self) -> int:
        """Of a chunk, at most."""
        return self._kind.tokens

    def prepare(self) -> None:
        """Compile what a chunk runs, and capture it."""
        with torch.cuda.stream(self._stream):
            self._graphs.prepare([self._kind], lambda _share: None)

    def read(self, chunk: ForwardInput) -> None:
        """Start a chunk of one row behind those before it, and behind what the current stream has by now."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._space.arrays.send(chunk, self._kind, (), ())
            self._graphs.run(self._kind, 0)
            self._ends.append(self._stream.record_event())

    def num_running(self) -> int:
        while self._ends and self._ends[0].query():
            self._ends.popleft()
        return len(self._ends)

    def wait(self) -> None:
        """Let the current stream wait for all chunks."""
        if self._ends:
            torch.cuda.current_stream().wait_event(self._ends[-1])

    def synchronize(self) -> None:
        """Let the host wait for all chunks: synchronizing the device does not, as they have a context of their own."""
        self._stream.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._graphs.close()


def _described(kind: StepKind) -> str:
    if not kind.tiles and not kind.decodes:
        return f"the logits of {kind.tokens} tokens"
    if not kind.tiles:
        return f"steps of {kind.tokens} decodes"
    return f"steps of {kind.tokens} tokens in chunks and {kind.decodes} decodes"

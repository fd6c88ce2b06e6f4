"""`DeltaColumns` turns the outputs of a step into `StepDeltas`."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import NO_SNAPSHOTS, SnapshotUse, TokenLogprobs, TokenOutput
from realizar.step_deltas import ChoiceEnd, ChoiceSnapshots, ChoiceStart, RequestFailure, StepDeltas, StepLogprobs

_Entries: TypeAlias = tuple[int, Sequence[TokenLogprobs]]  # with the choice's number


class DeltaColumns:
    """Numbers the choices of open requests, from their first output to their end."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._numbers: dict[str, dict[int, int]] = {}  # by request id and choice
        self._ended: dict[int, str] = {}  # request ids of the choices that the last step ended
        self._snapshots: dict[int, SnapshotUse] = {}  # of open choices, as said last

    def columns(self, outputs: Iterable[TokenOutput]) -> StepDeltas:
        numbers: list[int] = []
        counts: list[int] = []
        token_ids: list[int] = []
        starts: list[ChoiceStart] = []
        snapshots: list[ChoiceSnapshots] = []
        logprobs: list[_Entries] = []
        prompt_logprobs: list[_Entries] = []
        ends: list[ChoiceEnd] = []
        failures: list[RequestFailure] = []
        produced_s = 0.0
        self._ended.clear()
        for output in outputs:
            produced_s = output.produced_s
            choices = self._numbers.get(output.request_id)
            number = None if choices is None else choices.get(output.choice)
            if number is None:
                number = self._start(output, starts)
            if output.error is not None:
                self.forget(output.request_id)
                failures.append(RequestFailure(number, output.error))
                continue
            use = output.snapshots
            if use is not NO_SNAPSHOTS and self._snapshots.get(number) is not use:
                self._snapshots[number] = use
                snapshots.append(ChoiceSnapshots(number, use))
            new_ids = output.token_ids
            if new_ids:
                numbers.append(number)
                counts.append(len(new_ids))
                token_ids.extend(new_ids)
            if output.logprobs:
                logprobs.append((number, output.logprobs))
            if output.prompt_logprobs:
                prompt_logprobs.append((number, output.prompt_logprobs))
            if output.finish_reason is not None:
                self.forget(output.request_id, output.choice)
                self._ended[number] = output.request_id
                ends.append(ChoiceEnd(number, output.finish_reason, output.stop_token_id, output.pooled))
        return StepDeltas(
            produced_s=produced_s,
            numbers=array("q", numbers).tobytes(),
            counts=b"" if len(numbers) == len(token_ids) else array("i", counts).tobytes(),
            token_ids=array("i", token_ids).tobytes(),
            starts=tuple(starts),
            snapshots=tuple(snapshots),
            logprobs=_by_width(logprobs) if logprobs else (),
            prompt_logprobs=_by_width(prompt_logprobs) if prompt_logprobs else (),
            ends=tuple(ends),
            failures=tuple(failures),
        )

    def forget(self, request_id: str, choice: int | None = None) -> None:
        """Forget a request or one of its choices, which has ended or was aborted. Unknown ids pass."""
        choices = self._numbers.get(request_id)
        if choices is None:
            return
        for each in list(choices) if choice is None else [choice]:
            self._snapshots.pop(choices.pop(each, -1), None)
        if not choices:
            del self._numbers[request_id]

    def request_of(self, number: int) -> str | None:
        """The request of a choice that is open or that the last step ended. This looks through all open requests."""
        if number in self._ended:
            return self._ended[number]
        return next((name for name, choices in self._numbers.items() if number in choices.values()), None)

    def _start(self, output: TokenOutput, starts: list[ChoiceStart]) -> int:
        number = self._numbers.setdefault(output.request_id, {})[output.choice] = next(self._next)
        cached = output.num_cached_tokens
        starts.append(ChoiceStart(number, output.request_id, output.choice, output.scheduled_s, cached))
        return number


def _by_width(listed: Sequence[_Entries]) -> tuple[StepLogprobs, ...]:
    """The log-probabilities of choices, those together that list equally many ids."""
    of_step = [each for _, each in listed if type(each) is StepEntry]
    source = of_step[0].columns if of_step else None
    if source is not None and len(of_step) == len(listed) and all(each.columns is source for each in of_step):
        numbers = array("q", [number for number, _ in listed]).tobytes()
        return (StepLogprobs(numbers, source.picked([each.place for each in of_step])),)
    groups: dict[int, _Group] = {}
    for number, entries in listed:
        if type(entries) is StepEntry:  # `isinstance` asks an abstract class, which takes longer than all else here
            width = entries.columns.width
        elif isinstance(entries, LogprobColumns):
            width = entries.width
        else:
            width = 1 + max([len(entry.top) for entry in entries])
        group = groups.get(width)
        if group is None:
            group = groups[width] = _Group()
        group.add(number, entries)
    return tuple([group.made() for group in groups.values()])


class _Group:
    """Choices of one width: their numbers, and their entries as columns and then as those of the last kind."""

    __slots__ = ("_numbers", "_parts", "_places", "_single", "_source")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._parts: list[LogprobColumns] = []
        self._source: LogprobColumns | None = None  # of a backend's step, and the places of choices in it
        self._places: list[int] = []
        self._single: list[TokenLogprobs] = []

    def add(self, number: int, entries: Sequence[TokenLogprobs]) -> None:
        if type(entries) is StepEntry:
            if entries.columns is not self._source:
                self._convert()
                self._source = entries.columns
            self._places.append(entries.place)
            self._numbers.append(number)
            return
        self._numbers += [number] * len(entries)
        if isinstance(entries, LogprobColumns):
            self._convert()
            self._parts.append(entries)
            return
        if self._source is not None:
            self._convert()
        self._single += entries

    def made(self) -> StepLogprobs:
        self._convert()
        entries = self._parts[0] if len(self._parts) == 1 else LogprobColumns.joined(self._parts)
        return StepLogprobs(array("q", self._numbers).tobytes(), entries)

    def _convert(self) -> None:
        if self._source is not None:
            self._parts.append(self._source.picked(self._places))
            self._source, self._places = None, []
        if self._single:
            self._parts.append(LogprobColumns.of(self._single))
            self._single = []

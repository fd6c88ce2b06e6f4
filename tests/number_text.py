"""A vocabulary that spells numbers, in place of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.sampling_params import SamplingParams


class NumberText:
    """Token 17 is the text `17 `; the last character is held back for a while. The stop string `?` breaks it."""

    marks = ()

    def __init__(self, sampling: SamplingParams) -> None:
        self.stop_string: str | None = None
        self._stops, self._whole, self._given = sampling.stop, "", 0

    @property
    def may_stop(self) -> bool:
        return bool(self._stops)

    def add(self, token_ids: Sequence[int]) -> str:
        if "?" in self._stops:
            raise ValueError("no such number")
        self._whole += "".join(f"{token_id} " for token_id in token_ids)
        for stop in self._stops:
            if stop in self._whole:
                self.stop_string = stop
                self._whole = self._whole[: self._whole.index(stop)]
                return self._give(len(self._whole))
        return self._give(len(self._whole) - 1)

    def finish(self) -> str:
        return self._give(len(self._whole))

    def _give(self, end: int) -> str:
        text, self._given = self._whole[self._given : end], max(end, self._given)
        return text


def spelled(tokens: list[int]) -> str:
    return "".join(f"{token_id} " for token_id in tokens)

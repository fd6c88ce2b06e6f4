"""The counts and the faults of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MOST_SHOWN = 40


@dataclass
class Report:
    """Counts of answers by kind, and faults: sentences that each begin with what can be run again."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        """Note something that must not happen; the first are shown at once."""
        self.faults.append(text)
        if len(self.faults) <= _MOST_SHOWN:
            print(f"FAULT {text}", flush=True)

    def summary(self) -> str:
        shown = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        return f"{shown or 'nothing was sent'}; {len(self.faults)} faults"

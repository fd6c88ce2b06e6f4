"""The rows of a step as kernels of recurrences and convolutions read them. Standard library only."""

from __future__ import annotations

STATE_ROW_FIELDS = 6
FIRST, TOKENS, SLOT, IS_NEW, REPLAYED, UNCERTAIN = range(STATE_ROW_FIELDS)
"""int64 fields of a row of a step.

FIRST: the index of its first token in the step. TOKENS: how many it has, perhaps none.
SLOT: the row's number, where its live state and its replay buffer are.
IS_NEW: 1 where it begins at position 0: its state counts as zeros.
REPLAYED: tokens of the replay buffer, from the first on, that come between the live state and the step's first token.
UNCERTAIN: how many of its tokens, the last ones, may be undone: the live state becomes the one before them, and they
go into the replay buffer.
"""

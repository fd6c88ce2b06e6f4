"""Scheduling of steps: the sequences of each, and their tokens. Imports kv_cache and the nouns.

Read in this order:

1. `row_table.py`: all sequences that have a row, as columns, and `Sequence`, one choice of a request.
2. `scheduler.py`: how a step is scheduled and its results are taken in. Its docstring has the rules.
3. What it uses: `plan.py`, `pace.py`, `open_sequences.py`, `drafts.py`, `growing_deltas.py` and `state_copies.py`.
"""

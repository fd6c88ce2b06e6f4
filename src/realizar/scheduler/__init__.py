"""Scheduling of steps: the sequences of each, and their tokens. Imports kv_cache and the nouns.

Read in this order:

1. `sequence.py`, `row_table.py`: `Sequence`, one choice of a request, with the tokens of it that are computed or on
   their way; and the columns in which all sequences that have a row keep them.
2. `scheduler.py`: `Scheduler` schedules a step and takes in its results. Its docstring has the rules.
3. `steady.py`, `drafted.py`, `intake.py`: plain decodes of a step, scheduled all at once, those with drafts, and the
   results of a step.
4. `plan.py`, `pace.py`, `step_limit.py`: the step that is being composed, its prompt tokens beside decodes, and its
   size while the device is short of memory.
5. `open_sequences.py`, `policy.py`, `turns.py`, `admission.py`: the open sequences, their order, in turn by client, and
   the checks before they start.
6. `drafting.py`, `drafts.py`: the scheduler's side of drafts, and `PromptLookup`, the drafter.
7. `holding.py`: rows of a submitted step whose masks are late, which make no choice in it.
8. `snapshot_places.py`, `state_copies.py`: for models with a state, where snapshots of it are taken in a prompt, and
   the copies of a step.
9. `rows.py`, `results.py`, `counts.py`: the backend's rows, the outputs of requests, and the scheduler's counts.
"""

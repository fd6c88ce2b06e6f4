"""Scheduling of steps: the sequences of each, and their tokens. Imports kv_cache and the nouns.

Read in this order:

1. `row_table.py`: the columns in which all sequences that have a row keep how far they have come, the rule that ends an
   output among them; and `Sequence`, one choice of a request.
2. `scheduler.py`: `Scheduler` schedules a step and takes in its results. Its docstring has the rules.
3. `plan.py`, `pace.py`: the step that is being composed, its size while the device is short of memory, and its prompt
   tokens beside decodes.
4. `open_sequences.py`: the open sequences and their order, in turn by client.
5. `drafts.py`: the scheduler's side of drafts, and `PromptLookup`, the drafter.
6. `growing_deltas.py`: what steps give choices, until the engine hands it out.
7. `state_copies.py`: for models with a state, where snapshots of it are taken in a prompt, and the copies of a step.
"""

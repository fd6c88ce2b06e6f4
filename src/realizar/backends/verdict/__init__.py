"""Whether a GPU computes what the CPU does, found out on small models and kept.

`small_models.py` has a model for each kind of layer, and `small_steps.py` takes one through steps. `compare.py` holds
the outcome to `expected.npz`, what exact arithmetic gives: no kernel of the CPU is compiled for a GPU's sake.
`judge.py` finds the kernels to go on without, `kept.py` keeps the verdicts by card, driver and kernels, and `apply.py`
makes them count when a model is loaded. `beside.py` starts `comparing_process.py`, which does so beside a load.
"""

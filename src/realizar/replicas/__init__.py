"""Several engines behind one API: which of them a request goes to, and how they start, end and are replaced.

1. The choice: `routing.py` keeps what each replica holds, and weighs prefixes and load; `prompt_keys.py` names a
   prompt's blocks.
2. The engines: `link.py` makes one `EngineLink` of several. It owns each `replica.py`, follows requests,
   describes all as one, and starts engines and replaces them one by one.
3. The machine: `places.py` reads its sides and divides cores and GPUs, and `planning.py` memory too.
"""

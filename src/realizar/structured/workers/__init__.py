"""Processes that compile and follow grammars, so that a failure of llguidance affects only its own request.

A fork server (`fork_server`) reads the vocabulary once, and forks all others from itself. A new grammar is compiled in
a process without rows first, within bounds of time and memory. Then a few workers (`worker_process`), which grammars
share, follow its rows; a grammar that takes long, or at which a worker has ended, has one of its own. Requests for
masks of rows, and the masks, lie in memory that all processes share (`mask_memory`), with what each worker works on.

In the engine's process, `service` owns all of this, with what was compiled or refused: `compile_queue` shares the
compiler among clients, `worker` has the handles of the processes. `mask_requests` asks for masks and takes them in,
follows rows anew whose worker has ended, and finds what has ended it; `worker_pool` has the workers and places rows.
"""

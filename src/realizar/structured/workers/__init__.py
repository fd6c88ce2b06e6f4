"""Processes that compile and follow grammars, so that a failure of llguidance affects only its own request.

A fork server (`fork_server`) reads the vocabulary once. Every grammar gets a process of its own, forked from the server
(`grammar_process`), which compiles the grammar within bounds of time and memory and then follows the grammar's rows; a
grammar with many rows gets more of them (`spread`). A crash or a hang affects only those rows. Questions about rows,
and their masks, lie in memory that all processes share (`mask_memory`), and one ring of a `bell` wakes them. In the
engine's process, `service` owns all of this: `compile_queue` shares the compiler among clients, `server_handle` and
`worker` are the handles of the processes, `masks` asks them for masks and takes these in, `chosen` has what rows chose
since, `foreseen` the masks of rows that need no question: from known states in lines that `state_lines` gives to
grammars. `repair` follows rows anew whose process has died.
"""

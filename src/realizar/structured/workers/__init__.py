"""Processes that compile and follow grammars, so that llguidance can harm nothing but the request it works for.

A fork server (`fork_server`) reads the vocabulary once. Every grammar gets a process of its own, forked from it
(`grammar_process`): it compiles the grammar within bounds of time and memory, and then follows the rows that have it.
When it crashes or hangs, only those rows have to do with it. In the engine's process `service` owns all of this:
`compile_queue` shares the compiler among clients, `server_handle` and `worker` are the processes as seen from there,
`masks` puts a step's masks together.
"""

"""The callers' side of an engine takes requests and gives text.

Two clients share `prepare.py` (a checked `Request` from a prompt) and `output_processor.py` (tokens to text, each
choice in a `GrowingChoice` of `growing_choice.py`; failed outputs to errors). Read these first, then one client:

1. `engine_client.py`: `EngineClient`, for `LLM` and scripts. The caller's thread runs the steps; `interrupts.py` moves
   Ctrl-C to the end of a step, and `prompt_progress.py` reports progress.
2. `async_engine.py`: `AsyncEngine`, for the server. `async_link.py` connects it to an engine in a thread or a process;
   `owned_requests.py` shares one engine between several who have requests, such as API processes.
   `async_requests.py`, `async_stream.py` and `questions.py` hold its open requests and unanswered questions, and the
   first refuses requests that crash engines; `places.py` shares what may be open by client. `tasks.py` keeps work on
   the event loop that nobody waits for.
"""

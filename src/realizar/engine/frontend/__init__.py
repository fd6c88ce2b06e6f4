"""The frontend of an engine, in the process of those who call it: it takes requests and gives text.

1. `async_engine.py`: `AsyncEngine`, which servers, `LLM` and `AsyncLLM` have. `async_link.py` connects it to an engine
   on its event loop, in a thread or a process; `prepare.py` makes a checked `Request` of a prompt.
2. `open_requests.py` has its open requests, found in an `OpenTable` (`open_table.py`), and makes text of tokens, each
   choice in a `GrowingChoice` of `growing_choice.py`, and errors of failed outputs. `async_stream.py` is what a caller
   gets, deltas and results of `outputs.py`; `questions.py` holds unanswered questions, `places.py` shares what may be
   open by client, and `suspects.py` refuses requests that crash engines.
3. `engine_thread.py` gives the event loop to callers without one; `prompt_progress.py` reports progress of several
   prompts. `shared_engine.py` shares one engine between several who have requests, such as API processes. `tasks.py`
   keeps work on the event loop that nobody waits for.
"""

"""OpenAI's Responses API, with its items, its events and its store.

Read in this order:

1. `routes.py`: `POST /v1/responses`, and `input_tokens` below it; the response object, the events of a streamed one,
   and the form of its streams. References to items of kept responses are resolved here.
2. `records.py`: its body. `conversation.py` reads one as a `Conversation`, with the help of `reasoning.py` and
   `tools.py`.
3. `output_items.py`: the items of an answer.
4. `store.py` has the kept responses and reads their items; `kept.py` has their routes.
"""

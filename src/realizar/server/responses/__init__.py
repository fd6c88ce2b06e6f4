"""OpenAI's Responses API, with its items, its events and its store.

Read in this order:

1. `create.py`: `POST /v1/responses`, and `input_tokens` below it.
2. `records.py`: its body. `conversation.py` reads one as a `Conversation`, with the help of `input_items.py`,
   `reasoning.py`, `tools.py` and `custom_calls.py`; before that `references.py` finds the kept items that it names.
3. `output_items.py`: the items of an answer, to which `text_logprobs.py` assigns log-probabilities; `answers.py`: the
   response object; `stream.py`: the events of a streamed one.
4. `store.py` has the kept responses, which `keeper.py` puts there; `stored_items.py` reads their items, and `kept.py`
   has their routes.
5. `routes.py`: the dialect's routes and its form of streams.
"""

"""Ollama's dialect: chat, generation, embeddings and lists of models, with streams of lines of JSON.

Read in this order:

1. `chat.py`: `POST /api/chat`; `generate.py`: `POST /api/generate`.
2. `records.py`: their bodies; `options.py`: their sampling. `conversation.py` reads a body as a `Conversation`, with
   the help of `messages.py` and `tools.py`.
3. `parts.py`: the parts that an answer is made of; `times.py`: its durations; `answers.py`: its lines, or the whole
   answer.
4. `embed.py`: vectors. `listing.py`: the models and what they are. `management.py`: routes that would change them.
5. `names.py`: how a name finds its model. `routes.py`: the dialect's routes and its form of errors.
"""

"""Handlers of OpenAI's endpoints: a request record in, pieces or a whole answer out."""

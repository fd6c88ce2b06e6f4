"""Handlers of OpenAI's endpoints: each turns a request record into chunks or a whole answer."""

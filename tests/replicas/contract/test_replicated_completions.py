"""The tests of completions through the official client, by two replicas."""

from server.openai.test_completions import *  # noqa: F403 - the fixtures of this folder make the server

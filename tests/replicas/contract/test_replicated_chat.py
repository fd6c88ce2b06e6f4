"""The tests of chat through the official client, by two replicas."""

import pytest

from server.openai.test_chat import *  # noqa: F403 - the fixtures of this folder make the server

pytestmark = pytest.mark.full  # each time two replicas answer the tests of completions and embeddings

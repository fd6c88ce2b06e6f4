"""Names of models in the API, from their paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realizar.errors import InvalidRequestError
from realizar.server.models.names import default_name


def test_a_path_has_the_name_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "café.gguf"
    path.touch()
    assert default_name(str(path)) == "café"
    assert default_name("someone/model") == "someone/model"


@pytest.mark.parametrize("place", ["caf\udce9.gguf", "caf\udce9/model.gguf"])
def test_a_path_that_is_no_text_is_refused(tmp_path: Path, place: str) -> None:
    """JSON has no place for its name, nor have the messages between processes for the path."""
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert os.fsencode(path).count(b"caf\xe9")
    with pytest.raises(InvalidRequestError, match="not UTF-8") as refused:
        default_name(str(path))
    str(refused.value).encode()

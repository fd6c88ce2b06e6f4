"""`load_tokenizer` builds the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import TokenizerError
from realizar.tokenizer.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer of a checkpoint, from GGUF metadata or from the folder's `tokenizer.json`.

    Raises:
        TokenizerError: the vocabulary is missing, or can't be reproduced exactly.
        CheckpointError: the vocabulary is malformed.
    """
    if checkpoint.format == "gguf":
        from realizar.tokenizer.gguf_tokenizer import GGUFTokenizer

        return GGUFTokenizer(checkpoint)
    if checkpoint.tokenizer_path is None:
        raise TokenizerError(f"{checkpoint.path} has no tokenizer.json")
    from realizar.tokenizer.json_tokenizer import JSONTokenizer

    return JSONTokenizer(checkpoint)


def plain_encoder(path: str) -> Callable[[str], list[int]]:
    """Texts to ids without special tokens, for a process that has no model. Raises what the loads do."""
    tokenizer = load_tokenizer(open_checkpoint(path))
    return partial(tokenizer.encode, add_special=False, parse_special=False)

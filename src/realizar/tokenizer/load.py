"""Building the tokenizer of a model."""

from __future__ import annotations

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import TokenizerError
from realizar.tokenizer.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: from GGUF metadata alone, or from the folder's `tokenizer.json`.

    Raises:
        TokenizerError: no vocabulary, or one that can't be reproduced exactly.
        CheckpointError: a malformed one.
    """
    if checkpoint.format == "gguf":
        from realizar.tokenizer.gguf_tokenizer import GGUFTokenizer

        return GGUFTokenizer(checkpoint)
    if checkpoint.tokenizer_path is None:
        raise TokenizerError(f"{checkpoint.path} has no tokenizer.json")
    from realizar.tokenizer.json_tokenizer import JSONTokenizer

    return JSONTokenizer(checkpoint)

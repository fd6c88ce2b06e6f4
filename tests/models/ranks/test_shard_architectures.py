"""Every architecture, wide and shared by ranks: their sums are the whole, and what they do not divide is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from architectures import CASES, make_model
from models.ranks.sharded_reference import sharded_logits
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.shard import shard
from reference_model import ReferenceModel
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="the models are transformers', which needs torch")
pytest.importorskip("transformers", reason="the models are transformers'")

_REFUSED: dict[tuple[str, int], str] = {}
"""The reason that so many ranks do not divide a model, where they are not 3."""


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_ranks_share_every_architecture(name: str, tmp_path: Path) -> None:
    """Wide models, of 16 heads: 2, 4 and 8 ranks add up to the whole, and 3 do not divide it."""
    make_model(name, wide=True).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec, ids = build_spec(checkpoint, CASES[name].context_length), list(range(16))
    whole = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)
    for ranks in (2, 3, 4, 8):
        refused = _REFUSED.get((name, ranks)) or ("evenly" if ranks == 3 else None)
        if refused is not None:
            with pytest.raises(UnsupportedModelError, match=refused):
                shard(spec, ranks - 1, ranks)
            continue
        for rank in range(ranks):
            check_tensors(shard(spec, rank, ranks), checkpoint)
        found = sharded_logits(spec, checkpoint, ranks, ids, np.float64)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10 * np.abs(whole).max())

"""The kernels of gated delta nets on a GPU, beside their twin in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.recurrences.delta_cases import Net  # noqa: E402
from backends.cuda.recurrences.delta_checks import (  # noqa: E402
    GROUPED,
    SHORT,
    TILED,
    UNEVEN,
    UNEVEN_WIDE,
    WIDE,
    check_alike,
    check_decodes,
    check_first,
    check_once,
    check_scans,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("net", [GROUPED, TILED, SHORT, WIDE, UNEVEN, UNEVEN_WIDE])
def test_on_a_gpu(net: Net) -> None:
    """Products of tf32 keep three digits; token by token nearly all of float32 are kept."""
    check_decodes(net, "cuda", 2)
    check_first(net, "cuda", 2)
    for columns, norm, undone in ((128, 1.0, 1), (16, 1.0, 3), (128, 1e-6, 5)):
        check_once(net, "cuda", 2, columns, norm, undone)
    for sizes, uncertain in (((150, 90), 1), ((64, 65), 1), ((17, 200), 0)):
        check_scans(net, "cuda", sizes, uncertain, 5e-3, "tf32")
    check_scans(net, "cuda", (150, 90), 1, 2e-5, "tf32x3")
    check_alike("cuda", 2e-2)

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
    check_decays,
    check_decodes,
    check_first,
    check_once,
    check_rows,
    check_scans,
)
from backends.cuda.recurrences.delta_launches import HOPPER  # noqa: E402

pytestmark = pytest.mark.gpu
on_hopper = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a card of 9.0")
NARROW, GROUPED_WIDE = Net(2, 6, 128, 128, tiled=True), Net(2, 4, 128, 128, length=3)
EDGES = [
    ((0, 1, 0), (0, 63, 0), (0, 64, 0), (0, 65, 1)),
    ((1, 2, 1), (3, 17, 0), (100, 128, 5), (2, 129, 1)),
    ((64, 200, 0), (0, 1, 0), (77, 191, 3), (5, 20, 4)),
    ((10, 66, 1), (0, 192, 0), (9, 80, 15)),
]


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
    check_alike("cuda", 2e-2, "tf32")


@on_hopper
@pytest.mark.parametrize("net", [NARROW, GROUPED_WIDE], ids=["tiled", "neighbours"])
@pytest.mark.parametrize("rows", EDGES, ids=str)
def test_rows_scanned_on_hopper(net: Net, rows: tuple[tuple[int, int, int], ...]) -> None:
    check_rows(net, "cuda", rows, 5e-3, HOPPER)


@on_hopper
@pytest.mark.parametrize("net", [NARROW, GROUPED_WIDE, WIDE], ids=["tiled", "neighbours", "wide"])
def test_rows_of_one_token_on_hopper(net: Net) -> None:
    """Replayed tokens, states that nobody has written yet, uncertain tokens and rows that are none; gated and not."""
    check_first(net, "cuda", 2, HOPPER)
    for splits, undone in ((1, 1), (2, 3), (3, 5)):
        for columns in (64, 128):
            check_once(net, "cuda", splits, columns, undone=undone, precision=HOPPER)


@on_hopper
@pytest.mark.parametrize("net", [Net(16, 48, 128, 128, tiled=True), Net(16, 32, 128, 128)], ids=["48", "32"])
def test_models_scanned_on_hopper(net: Net) -> None:
    """Two chunks, the second of which goes on from the first's state and ring, and the last token once more."""
    check_scans(net, "cuda", (64, 66), 1, 5e-3, HOPPER)


@on_hopper
def test_strong_and_weak_links_on_hopper() -> None:
    check_alike("cuda", 2e-2, HOPPER, Net(1, 2, 128, 128))
    check_decays("cuda", 5e-3, HOPPER)

"""The kernels of gated delta nets, interpreted, beside their twin in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.recurrences.delta_cases import Net  # noqa: E402
from backends.cuda.recurrences.delta_checks import (  # noqa: E402
    GROUPED,
    SHORT,
    TILED,
    UNEVEN,
    check_alike,
    check_decodes,
    check_first,
    check_once,
    check_scans,
)
from wider import wider  # noqa: E402

HEAD = Net(1, 3, 16, 64)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")


@pytest.mark.parametrize(("net", "splits"), wider([(TILED, 2), (SHORT, 1), (UNEVEN, 1)], (SHORT, 1)))
def test_rows_of_decodes_and_drafts(net: Net, splits: int) -> None:
    check_decodes(net, "cpu", splits)


@pytest.mark.parametrize(
    ("net", "splits", "columns", "norm", "undone"),
    wider(
        [
            (TILED, 2, 16, 1.0, 3),
            (SHORT, 1, 16, 1e-6, 1),
            (GROUPED, 1, 16, 1.0, 1),
            (HEAD, 2, 64, 1e-6, 5),
            (UNEVEN, 1, 32, 1.0, 1),
            (UNEVEN, 2, 16, 1.0, 3),
        ],
        (SHORT, 1, 16, 1e-6, 1),
        (UNEVEN, 1, 32, 1.0, 1),
    ),
)
def test_rows_of_one_token(net: Net, splits: int, columns: int, norm: float, undone: int) -> None:
    """Whole heads through norm and gate, and halves of heads without."""
    check_once(net, "cpu", splits, columns, norm, undone)


@pytest.mark.parametrize(("net", "splits"), wider([(TILED, 1), (SHORT, 2), (UNEVEN, 1)], (SHORT, 2)))
def test_first_tokens_of_a_row(net: Net, splits: int) -> None:
    check_first(net, "cpu", splits)


@pytest.mark.parametrize(
    ("net", "sizes", "uncertain"),
    wider([(TILED, (70, 17), 0), (SHORT, (17, 65), 1), (UNEVEN, (17, 65), 1)], (SHORT, (17, 65), 1)),
)
def test_scanned_rows_beside_decodes(net: Net, sizes: tuple[int, int], uncertain: int) -> None:
    check_scans(net, "cpu", sizes, uncertain)


def test_rows_scanned_with_arrays_of_halves() -> None:
    check_scans(TILED, "cpu", (70, 17), 0, 2e-3, "tf32")


def test_keys_that_are_all_alike_do_not_grow() -> None:
    check_alike("cpu", 1e-4, "ieee")

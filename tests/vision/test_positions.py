"""Where each patch lies, in the order in which patches are cut, and the angles that follow."""

from __future__ import annotations

import numpy as np

from engine.messages import PatchSpec
from vision.positions import block_positions, rotary_tables
from vision.preprocess import Grid, cut


def test_positions_come_in_the_order_of_the_patches() -> None:
    """T32: the same block order for pixels and for rotary positions."""
    spec = PatchSpec("glm5_next", 1, 2, 2, 1, 100, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    rows, columns = 6, 4
    where = np.zeros((rows, columns, 3), np.uint8)
    where[..., 0], where[..., 1] = np.indices((rows, columns))

    patches = cut(where, spec, Grid(rows, columns, rows, columns, rows * columns // 4))
    row, column = block_positions(rows, columns, 2)

    assert np.array_equal(patches[:, 0], row)
    assert np.array_equal(patches[:, 1], column)
    assert list(zip(row[:5].tolist(), column[:5].tolist(), strict=True)) == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2),
    ]  # fmt: skip


def test_angles_are_rows_first_then_columns_in_both_halves() -> None:
    """T28: half-split, not interleaved; h and w not swapped."""
    dim, theta = 16, 10_000.0
    cos, sin = rotary_tables(4, 6, 2, dim, theta)
    row, column = block_positions(4, 6, 2)

    inverse = theta ** (-2 * np.arange(4) / 8)
    angles = np.concatenate([np.outer(row, inverse), np.outer(column, inverse)], axis=1)

    for half in (slice(0, 8), slice(8, 16)):
        np.testing.assert_allclose(cos[:, half], np.cos(angles), atol=2e-6)
        np.testing.assert_allclose(sin[:, half], np.sin(angles), atol=2e-6)


def test_tables_are_computed_once_a_grid_and_cannot_be_written() -> None:
    """The first picture of a size pays, the next one does not."""
    first, again = rotary_tables(8, 8, 2, 32, 10_000.0), rotary_tables(8, 8, 2, 32, 10_000.0)

    assert first is again
    assert not first[0].flags.writeable

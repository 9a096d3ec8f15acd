"""Row and column positions of image tokens, and their rotary tables (2-D rotary)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def block_positions(
    rows: int, columns: int, merge: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Row and column of each patch, in merge-block order: the order in which patches are cut.

    Shapes: results (rows * columns,) i32
    """
    row, column = np.indices((rows, columns), dtype=np.int32)

    def in_blocks(grid: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        blocks = grid.reshape(rows // merge, merge, columns // merge, merge)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(-1)

    return in_blocks(row), in_blocks(column)


@lru_cache(maxsize=32)
def rotary_tables(
    rows: int, columns: int, merge: int, dim: int, theta: float
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin of one picture's patches: row angles, then column angles, both halves alike.

    Rounded to float32 step by step, as the reference does. Computed once a grid; read-only.

    Shapes: results (rows * columns, dim) f32, dim a multiple of 4
    Source: glm5_next.md section 9, step 2
    """
    quarter = dim // 4
    exponents = np.arange(quarter, dtype=np.float32) * np.float32(2.0 / (dim // 2))
    inverse = (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)
    row, column = block_positions(rows, columns, merge)
    angles = np.concatenate(
        [np.outer(row.astype(np.float32), inverse), np.outer(column.astype(np.float32), inverse)],
        axis=1,
    )
    whole = np.concatenate([angles, angles], axis=1)
    cos, sin = np.cos(whole), np.sin(whole)
    cos.setflags(write=False)
    sin.setflags(write=False)
    return cos, sin

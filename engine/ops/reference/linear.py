"""plain NumPy: dense matmul, and one matrix a head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch

VECTOR_ROWS = 2  # up to so many rows, one GEMV each beats a GEMM


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight as BLAS likes it: (ins, outs), contiguous, never a transposed view (5x slower)."""

    weight: Array
    bias: Array | None


def pack(weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> Dense:
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ShapeMismatch(
            f"a dense weight is (outs, ins) and its bias (outs,), not {weight.shape}."
        )
    return Dense(np.ascontiguousarray(weight.T), bias)


def pack_heads(weight: npt.NDArray[np.float32]) -> Array:
    if weight.ndim != 3:
        raise ShapeMismatch(f"weights of heads are (heads, ins, outs), not {weight.shape}.")
    return np.ascontiguousarray(weight)


def take_rows(x: Array, ids: Array) -> Array:
    return x[ids]


def linear(x: Array, w: Dense) -> Array:
    if x.ndim != 2 or x.shape[1] != w.weight.shape[0]:
        raise ShapeMismatch(f"x {x.shape} does not fit a weight of {w.weight.shape} (ins, outs).")
    if len(x) <= VECTOR_ROWS:
        out = np.empty((len(x), w.weight.shape[1]), np.float32)
        for row, into in zip(x, out, strict=True):
            np.dot(row, w.weight, into)
    else:
        out = np.dot(x, w.weight)
    if w.bias is not None:
        out += w.bias
    return out


def head_linear(x: Array, w: Array) -> Array:
    if x.ndim != 3 or x.shape[1:] != w.shape[:2]:
        raise ShapeMismatch(f"x {x.shape} does not fit heads of {w.shape} (heads, ins, outs).")
    out = np.empty((x.shape[0], w.shape[0], w.shape[2]), np.float32)
    np.matmul(x.transpose(1, 0, 2), w, out=out.transpose(1, 0, 2))
    return out

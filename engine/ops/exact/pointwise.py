"""exact NumPy: norm and stream mix, one arithmetic for any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.exact.linear import Panels, linear, panels_of
from engine.ops.reference import pointwise
from engine.ops.reference.pointwise import SAFE, Hyper, inverse_rms

FLOAT_ROWS = 6  # up to so many rows Python floats are faster, and they are the same float64


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    if x.shape[-1] != len(weight):
        raise ShapeMismatch(f"x {x.shape} does not fit a norm of width {len(weight)}.")
    y = x * inverse_rms(x, eps)
    y *= weight
    return y


@dataclass(frozen=True, slots=True)
class Site:
    """A hyper-connection site as the reference folds it, its matrix in panels."""

    hyper: Hyper
    fn: Panels


def pack_hyper(
    fn: npt.NDArray[np.float32],
    base: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    norm: npt.NDArray[np.float32],
) -> Site:
    hyper = pointwise.pack_hyper(fn, base, scale, norm)
    return Site(hyper, panels_of(hyper.fn[None]))


def hyper_in(x: Array, w: Site, *, norm_eps: float, eps: float, rounds: int) -> tuple[Array, Array]:
    n = w.hyper.streams
    if x.ndim != 3 or x.shape[1:] != (n + 1, len(w.hyper.norm)):
        raise ShapeMismatch(f"streams {x.shape} do not fit a site of {n} x {len(w.hyper.norm)}.")
    pre, mix = hyper_coefficients(x, w, norm_eps=norm_eps, eps=eps, rounds=rounds)
    u = np.matmul(pre[:, None], x[:, :n])[:, 0]
    return rms_norm(u, w.hyper.norm, norm_eps), mix


def hyper_coefficients(
    x: Array, w: Site, *, norm_eps: float, eps: float, rounds: int
) -> tuple[Array, Array]:
    """As the reference's: pre (rows, n) and mix (rows, n, n + 1)."""
    rows, n = len(x), w.hyper.streams
    flat = x[:, :n].reshape(rows, -1)
    m = linear(flat, w.fn)
    m *= inverse_rms(flat, norm_eps)
    m += w.hyper.base
    if not w.hyper.bounded:
        np.clip(m[:, : 2 * n], -SAFE, SAFE, out=m[:, : 2 * n])
        comb = m[:, 2 * n :].reshape(rows, n, n)
        m[:, 2 * n :] = (comb - comb.max(axis=1, keepdims=True)).reshape(rows, -1)
    e = np.exp(m)
    mix = np.empty((rows, n, n + 1), np.float32)
    if n == 4 and w.hyper.bounded and rows <= FLOAT_ROWS:
        return of_few(e, eps, rounds, mix), mix
    return of_many(e, n, eps, rounds, mix), mix


def of_many(e: Array, n: int, eps: float, rounds: int, mix: Array) -> Array:
    """Gates and balanced matrices from exponentials, in float64 and in the order of the few.

    Shapes: e (rows, 2n + n*n) f32 · mix (rows, n, n + 1), written · result pre (rows, n) f32
    """
    rows = len(e)
    wide = e.astype(np.float64)
    gates = wide[:, : 2 * n] + 1.0
    mix[:, :, n] = 2.0 / gates[:, n:]
    lines = np.ascontiguousarray(wide[:, 2 * n :].T).reshape(n, n, rows)
    mix[:, :, :n] = balance(lines, eps, rounds).transpose(2, 0, 1)
    pre: Array = (1.0 / gates[:, :n] + eps).astype(np.float32)
    return pre


def of_few(e: Array, eps: float, rounds: int, mix: Array) -> Array:
    """The same bits without an array: every float64 operation is the same, in the same order."""
    pre = []
    for row, v in enumerate(e.tolist()):
        a, b, c, d = pointwise.sinkhorn_four(v[8:], eps, rounds)
        p0, p1, p2, p3 = (2.0 / (value + 1.0) for value in v[4:8])
        mix[row] = (*a, p0), (*b, p1), (*c, p2), (*d, p3)
        pre.append([1.0 / (value + 1.0) + eps for value in v[:4]])
    return np.array(pre, np.float32)


def balance(c: Array, eps: float, rounds: int) -> Array:
    """`sinkhorn_four` for any size and many matrices: divisors of lines, sums in the same order.

    Shapes: c, result (n, n, rows) f64, of transposed matrices: entry (j, i) is C[i][j]; c is
            e^logits and is changed
    """
    n, _, rows = c.shape
    # Each sum has its own layout, in which the halves that are added lie side by side.
    parts_j, parts_i = np.empty((n, n, rows)), np.empty((n, n, rows))
    over_j, sum_i = _folding(parts_j)  # over lines j, for each i
    over_i, sum_j = _folding(parts_i)
    turned = parts_i.swapaxes(0, 1)
    np.copyto(parts_j, c)
    for step in over_j:
        np.add(*step)
    c /= sum_i  # the softmax of each row of C
    c += eps
    np.copyto(turned, c)
    for step in over_i:
        np.add(*step)
    by_i, by_j = np.ones((n, rows)), sum_j + eps  # divisors of the lines
    columns, little = by_j[:, None], np.full((n, rows), eps)
    for _ in range(rounds - 1):
        np.divide(c, columns, parts_j)
        for step in over_j:
            np.add(*step)
        np.multiply(by_i, little, by_i)
        np.add(sum_i, by_i, by_i)
        np.divide(c, by_i, turned)
        for step in over_i:
            np.add(*step)
        np.multiply(by_j, little, by_j)
        np.add(sum_j, by_j, by_j)
    c /= columns
    c /= by_i
    return c


def _folding(parts: Array) -> tuple[list[tuple[Array, Array, Array]], Array]:
    """Additions that fold an array over its first axis, upper half on lower, and where the sum is.

    A reduction of NumPy may take another order; Python floats have to take this one.
    """
    steps = []
    while len(parts) > 1:
        half = len(parts) // 2
        folded = np.empty(parts[:half].shape)
        steps.append((parts[:half], parts[half : 2 * half], folded))
        if len(parts) % 2:
            steps.append((folded[0], parts[-1], folded[0]))
        parts = folded
    return steps, parts[0]

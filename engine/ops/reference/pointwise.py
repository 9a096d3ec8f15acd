"""plain NumPy: norm, rotary, gate, stream mix, row add."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch

SAFE = np.float32(80.0)  # exp(80) and small sums of it stay finite in float32
FLOAT_ROWS = 2  # up to so many rows, Python floats beat arrays for what is smaller than a row
ONE = np.float32(1.0)  # half the cost of a Python number as an operand


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.negative(x)
    np.minimum(e, SAFE, out=e)
    np.exp(e, out=e)
    e += ONE
    return np.reciprocal(e, out=e)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    e = np.negative(x)
    np.minimum(e, SAFE, out=e)
    np.exp(e, out=e)
    e += ONE
    return np.divide(x, e, out=e)


def gated(gate: Array, up: Array, limit: float | None) -> Array:
    """silu(gate) * up, clamped before the activation; the gate has no lower clamp."""
    if limit is not None:
        gate = np.minimum(gate, limit)
        up = np.maximum(up, -limit)
        np.minimum(up, limit, out=up)
    y = silu(gate)
    y *= up
    return y


def inverse_rms(x: Array, eps: float) -> Array:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with length 1."""
    scale = np.vecdot(x, x)
    scale *= 1.0 / x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    return np.reciprocal(scale, out=scale)[..., None]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    if x.shape[-1] != len(weight):
        raise ShapeMismatch(f"x {x.shape} does not fit a norm of width {len(weight)}.")
    if x.size == len(weight):  # one row: Python floats cost less than four calls
        flat = x.reshape(-1)
        y = x * (1.0 / math.sqrt(float(np.dot(flat, flat)) / len(weight) + eps))
    else:
        y = x * inverse_rms(x, eps)
    y *= weight
    return y


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    if x.shape[-1] != len(weight):
        raise ShapeMismatch(f"x {x.shape} does not fit a norm of width {len(weight)}.")
    y = x - np.add.reduce(x, axis=-1, keepdims=True) / len(weight)
    y *= inverse_rms(y, eps)
    y *= weight
    y += bias
    return y


def add(x: Array, y: Array) -> Array:
    if x.shape != y.shape:
        raise ShapeMismatch(f"cannot add {y.shape} to {x.shape}.")
    return x + y


def swiglu(gate_up: Array, limit: float | None) -> Array:
    inner = gate_up.shape[-1] // 2
    if gate_up.shape[-1] != 2 * inner:
        raise ShapeMismatch(
            f"gate and up have {gate_up.shape[-1]} columns together, an odd number."
        )
    return gated(gate_up[..., :inner], gate_up[..., inner:], limit)


def gelu(x: Array) -> Array:
    return (0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))).astype(np.float32, copy=False)


def erf(x: Array) -> Array:
    """The error function, to 1.5e-7.

    Source: Abramowitz and Stegun, 7.1.26
    """
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x, dtype=np.float64))
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    return np.copysign(1.0 - series * np.exp(-np.square(x, dtype=np.float64)), x)


def rotate_half(x: Array, cos: Array, sin: Array) -> Array:
    if cos.shape != (x.shape[0], x.shape[2]) or sin.shape != cos.shape:
        raise ShapeMismatch(f"angles {cos.shape} do not fit x {x.shape}.")
    half = x.shape[2] // 2
    y = x * cos[:, None]
    y[..., :half] -= x[..., half:] * sin[:, None, :half]
    y[..., half:] += x[..., :half] * sin[:, None, half:]
    return y


def lay_rows(x: Array, rows: Array, spans: tuple[tuple[int, int, int], ...]) -> None:
    for place, row, count in spans:
        if min(place, row) < 0 or place + count > len(x) or row + count > len(rows):
            raise ShapeMismatch(
                f"span ({place}, {row}, {count}) leaves {len(x)} rows or an overlay of {len(rows)}."
            )
    for place, row, count in spans:
        x[place : place + count] = rows[row : row + count]


def is_finite(x: Array) -> bool:
    return bool(np.isfinite(x).all())


# -- hyper-connections (glm 4) -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hyper:
    """A site, laid out so that one exp serves all and the mix comes out transposed.

    Shapes: fn (n*hidden, 2n + n*n), scale folded in, pre and post negated, comb transposed
            base (2n + n*n,), the same way · norm (hidden,)
    """

    streams: int
    fn: Array
    base: Array
    norm: Array
    bounded: bool  # no logit can leave [-80, 80], so exp needs no maximum taken off


def pack_hyper(
    fn: npt.NDArray[np.float32],
    base: npt.NDArray[np.float32],
    scale: npt.NDArray[np.float32],
    norm: npt.NDArray[np.float32],
) -> Hyper:
    hidden = len(norm)
    n = fn.shape[1] // hidden
    if fn.shape != (2 * n + n * n, n * hidden) or base.shape != fn.shape[:1] or scale.shape != (3,):
        raise ShapeMismatch(
            f"fn {fn.shape}, base {base.shape}, scale {scale.shape} are no site of width {hidden}."
        )
    factors = np.repeat(scale.astype(np.float64), (n, n, n * n))
    factors[: 2 * n] *= -1.0
    order = np.concatenate([np.arange(2 * n), 2 * n + np.arange(n * n).reshape(n, n).T.ravel()])
    folded = fn[order] * factors[order, None]
    signs = np.where(np.arange(len(base)) < 2 * n, -1.0, 1.0)
    # Behind the norm a row has length sqrt(n * hidden) at most.
    bound = np.linalg.norm(folded, axis=1) * math.sqrt(n * hidden) + np.abs(base[order])
    return Hyper(
        streams=n,
        fn=np.ascontiguousarray(folded.T, np.float32),
        base=np.ascontiguousarray(signs * base[order], np.float32),
        norm=norm,
        bounded=bool(bound.max() < SAFE),
    )


def hyper_expand(x: Array, streams: int) -> Array:
    out = np.empty((x.shape[0], streams + 1, x.shape[1]), np.float32)
    out[:] = x[:, None]
    return out


def hyper_in(
    x: Array, w: Hyper, *, norm_eps: float, eps: float, rounds: int
) -> tuple[Array, Array]:
    n = w.streams
    if x.ndim != 3 or x.shape[1:] != (n + 1, len(w.norm)):
        raise ShapeMismatch(f"streams {x.shape} do not fit a site of {n} x {len(w.norm)}.")
    if len(x) <= FLOAT_ROWS and n == 4 and w.bounded:
        h = np.empty((len(x), len(w.norm)), np.float32)
        mix = np.empty((len(x), 4, 5), np.float32)
        for row in range(len(x)):
            _hyper_in_one_row(x[row], w, norm_eps, eps, rounds, h[row], mix[row])
        return h, mix
    pre, mix = hyper_coefficients(x, w, norm_eps=norm_eps, eps=eps, rounds=rounds)
    u = np.matmul(pre[:, None], x[:, :n])[:, 0]
    return rms_norm(u, w.norm, norm_eps), mix


def hyper_coefficients(
    x: Array, w: Hyper, *, norm_eps: float, eps: float, rounds: int
) -> tuple[Array, Array]:
    """Steps 1 to 6 for any number of rows.

    Shapes: pre (rows, n) · mix (rows, n, n + 1) as in `hyper_in`
    """
    rows, n = len(x), w.streams
    flat = x[:, :n].reshape(rows, -1)
    m = np.dot(flat, w.fn)
    m *= inverse_rms(flat, norm_eps)
    m += w.base
    if not w.bounded:
        np.clip(m[:, : 2 * n], -SAFE, SAFE, out=m[:, : 2 * n])
        comb = m[:, 2 * n :].reshape(rows, n, n)
        comb -= comb.max(axis=1, keepdims=True)
    np.exp(m, out=m)

    gates = m[:, : 2 * n] + 1.0
    np.reciprocal(gates, out=gates)
    pre = gates[:, :n] + eps
    mix = np.empty((rows, n, n + 1), np.float32)
    np.multiply(gates[:, n:], 2.0, out=mix[:, :, n])
    balanced = sinkhorn(np.ascontiguousarray(m[:, 2 * n :].T), n, eps, rounds)
    mix[:, :, :n] = balanced.T.reshape(rows, n, n)
    return pre, mix


def sinkhorn(c: Array, n: int, eps: float, rounds: int) -> Array:
    """Balance matrices, columns first and last: `rounds` column passes, one row pass less.

    Sums over a line come from a product with a mask of ones; numpy's reductions over an axis of
    length 4 take 4 to 10 times as long. A row of ones under the matrices carries `eps` in.

    Shapes: c, result (n*n, rows), of transposed matrices: entry j*n + i is C[i][j]; c is e^logits
    """
    across_i, across_j = _line_masks(n, eps)
    work = np.empty((n * n + 1, c.shape[1]), np.float32)
    work[n * n] = 1.0
    entries = work[: n * n]
    sums = np.dot(across_j[:, : n * n], c)
    np.divide(c, sums, out=entries)  # the softmax of each row of C
    entries += eps
    np.dot(across_i, work, out=sums)
    np.divide(entries, sums, out=entries)
    for _ in range(rounds - 1):
        np.dot(across_j, work, out=sums)
        np.divide(entries, sums, out=entries)
        np.dot(across_i, work, out=sums)
        np.divide(entries, sums, out=entries)
    return entries


_MASKS: dict[tuple[int, float], tuple[Array, Array]] = {}


def _line_masks(n: int, eps: float) -> tuple[Array, Array]:
    """Two (n*n, n*n + 1) masks: sums over i for fixed j, sums over j for fixed i; each plus eps."""
    if (n, eps) not in _MASKS:
        j, i = np.divmod(np.arange(n * n), n)
        last = np.full((n * n, 1), eps)
        same_j, same_i = (np.hstack([line[:, None] == line, last]) for line in (j, i))
        _MASKS[n, eps] = same_j.astype(np.float32), same_i.astype(np.float32)
    return _MASKS[n, eps]


def _hyper_in_one_row(
    x: Array, w: Hyper, norm_eps: float, eps: float, rounds: int, h: Array, mix: Array
) -> None:
    """The same for one row and four streams: Python floats beat eighty calls of NumPy.

    Shapes: x (5, hidden) · h (hidden,) and mix (4, 5), written
    """
    flat = x[:4].reshape(-1)
    m = np.dot(flat, w.fn)
    m *= 1.0 / math.sqrt(float(np.dot(flat, flat)) / len(flat) + norm_eps)
    m += w.base
    e = np.exp(m, out=m).tolist()
    p0, p1, p2, p3 = (2.0 / (1.0 + v) for v in e[4:8])
    a, b, c, d = sinkhorn_four(e[8:], eps, rounds)
    mix[:] = (*a, p0), (*b, p1), (*c, p2), (*d, p3)
    pre = np.array([1.0 / (1.0 + v) + eps for v in e[:4]], np.float32)
    np.dot(pre, x[:4], h)
    h *= 1.0 / math.sqrt(float(np.dot(h, h)) / len(h) + norm_eps)
    h *= w.norm


Four = tuple[float, float, float, float]


def sinkhorn_four(e: list[float], eps: float, rounds: int) -> tuple[Four, Four, Four, Four]:
    """`sinkhorn` of one 4 x 4 matrix, as a divisor for each line: entry (j, i) is k_ji / (p_j v_i).

    Letters a..d are the lines j with divisors p..s, digits 0..3 the lines i with divisors v.
    """
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = e
    v0, v1 = (a0 + c0) + (b0 + d0), (a1 + c1) + (b1 + d1)
    v2, v3 = (a2 + c2) + (b2 + d2), (a3 + c3) + (b3 + d3)
    a0, a1, a2, a3 = a0 / v0 + eps, a1 / v1 + eps, a2 / v2 + eps, a3 / v3 + eps
    b0, b1, b2, b3 = b0 / v0 + eps, b1 / v1 + eps, b2 / v2 + eps, b3 / v3 + eps
    c0, c1, c2, c3 = c0 / v0 + eps, c1 / v1 + eps, c2 / v2 + eps, c3 / v3 + eps
    d0, d1, d2, d3 = d0 / v0 + eps, d1 / v1 + eps, d2 / v2 + eps, d3 / v3 + eps
    v0 = v1 = v2 = v3 = 1.0
    p, q = (a0 + a2) + (a1 + a3) + eps, (b0 + b2) + (b1 + b3) + eps
    r, s = (c0 + c2) + (c1 + c3) + eps, (d0 + d2) + (d1 + d3) + eps
    for _ in range(rounds - 1):
        v0 = (a0 / p + c0 / r) + (b0 / q + d0 / s) + eps * v0
        v1 = (a1 / p + c1 / r) + (b1 / q + d1 / s) + eps * v1
        v2 = (a2 / p + c2 / r) + (b2 / q + d2 / s) + eps * v2
        v3 = (a3 / p + c3 / r) + (b3 / q + d3 / s) + eps * v3
        p = (a0 / v0 + a2 / v2) + (a1 / v1 + a3 / v3) + eps * p
        q = (b0 / v0 + b2 / v2) + (b1 / v1 + b3 / v3) + eps * q
        r = (c0 / v0 + c2 / v2) + (c1 / v1 + c3 / v3) + eps * r
        s = (d0 / v0 + d2 / v2) + (d1 / v1 + d3 / v3) + eps * s
    return (
        (a0 / p / v0, a1 / p / v1, a2 / p / v2, a3 / p / v3),
        (b0 / q / v0, b1 / q / v1, b2 / q / v2, b3 / q / v3),
        (c0 / r / v0, c1 / r / v1, c2 / r / v2, c3 / r / v3),
        (d0 / s / v0, d1 / s / v1, d2 / s / v2, d3 / s / v3),
    )


def hyper_out(x: Array, y: Array, mix: Array) -> Array:
    n = mix.shape[1]
    if x.shape != (len(mix), n + 1, y.shape[-1]) or len(y) != len(x):
        raise ShapeMismatch(f"streams {x.shape}, output {y.shape} and mix {mix.shape} do not fit.")
    x[:, n] = y
    out = np.empty_like(x)
    np.matmul(mix, x, out=out[:, :n])
    return out


def hyper_mean(x: Array) -> Array:
    n = x.shape[1] - 1
    return np.add.reduce(x[:, :n], axis=1) / n

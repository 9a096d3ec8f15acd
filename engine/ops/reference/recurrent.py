"""plain NumPy: KDA step and chunk, short conv."""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.reference.pointwise import inverse_rms, sigmoid, silu
from engine.ops.spec import Rows, Segment

CHUNK = 16  # tokens; 16 * 5 = 80 is the most that e^-G may reach in float32 (glm 5.6)
DECAY_LIMIT = -80.0
NORM_EPS = 1e-6  # inside the root of the L2 norms; unrelated to the model's eps


def short_conv(x: Array, kernel: Array, window: Array, rows: Rows) -> Array:
    taps, channels = kernel.shape
    if x.shape[1:] != (channels,) or window.shape[1:] != (taps - 1, channels):
        raise ShapeMismatch(f"x {x.shape}, kernel {kernel.shape} and window {window.shape}.")
    for slot in rows.fresh_slots:
        window[slot] = 0.0
    out = np.empty((len(x), channels), np.float32)
    decode = rows.decode
    if decode:
        seen = np.empty((decode, taps, channels), np.float32)
        seen[:, :-1] = window[rows.decode_slots]
        seen[:, -1] = x[:decode]
        np.add.reduce(seen * kernel, axis=1, out=out[:decode])
        window[rows.decode_slots] = seen[:, 1:]
    for first, count, _, slot in rows.segments[decode:]:
        stretch = np.empty((taps - 1 + count, channels), np.float32)
        stretch[: taps - 1] = window[slot]
        stretch[taps - 1 :] = x[first : first + count]
        y = out[first : first + count]
        np.multiply(stretch[:count], kernel[0], out=y)
        part = np.empty_like(y)
        for tap in range(1, taps):
            np.multiply(stretch[tap : tap + count], kernel[tap], out=part)
            y += part
        window[slot] = stretch[count:]
    return silu(out)


def kda_gates(
    f: Array, b: Array, rate: Array, dt_bias: Array, lower_bound: float | None
) -> tuple[Array, Array]:
    if f.shape[1:] != rate.shape or rate.shape != dt_bias.shape or len(f) != len(b):
        raise ShapeMismatch(f"f {f.shape}, b {b.shape}, rate {rate.shape}, bias {dt_bias.shape}.")
    y = f + dt_bias
    if lower_bound is None:
        g = np.where(y > 20.0, y, np.log1p(np.exp(np.minimum(y, 20.0))))
        g *= -rate
    else:
        y *= rate
        g = sigmoid(y)
        g *= lower_bound
    return g.reshape(len(b), b.shape[1], -1), sigmoid(b)


def kda(qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> Array:
    check_kda(qkv, g, beta, state)
    for slot in rows.fresh_slots:
        state[slot] = 0.0
    qk, v = normalised(qkv)
    out = np.empty(v.shape, np.float32)
    decode = rows.decode
    if decode:
        memory = state[rows.decode_slots]
        one_token(qk[:decode], v[:decode], g[:decode], beta[:decode], memory, out[:decode])
        if not isinstance(rows.decode_slots, slice):
            state[rows.decode_slots] = memory
    for segment in rows.segments[decode:]:
        _chunks(qk, v, g, beta, state[segment.slot], segment, out)
    return out


def check_kda(qkv: Array, g: Array, beta: Array, state: Array) -> None:
    """Raises `ShapeMismatch`."""
    count, three, heads, dim = qkv.shape
    if three != 3 or g.shape != (count, heads, dim) or beta.shape != (count, heads):
        raise ShapeMismatch(f"qkv {qkv.shape}, g {g.shape}, beta {beta.shape}.")
    if state.shape[1:] != (heads, dim, dim):
        raise ShapeMismatch(f"state {state.shape} does not fit {heads} heads of {dim}.")


def normalised(qkv: Array) -> tuple[Array, Array]:
    """Query and key with their L2 norms (glm 5.2), and the value.

    Shapes: qkv (rows, 3, heads, dim) -> (rows, 2, heads, dim), new · (rows, heads, dim), a view
    """
    qk = qkv[:, :2]
    norms = np.vecdot(qk, qk)
    norms += NORM_EPS
    np.sqrt(norms, out=norms)
    norms[:, 0] *= qkv.shape[3] ** 0.5  # the query's own scale, behind its L2 norm
    return qk / norms[..., None], qkv[:, 2]


def one_token(qk: Array, v: Array, g: Array, beta: Array, memory: Array, out: Array) -> None:
    """glm 5.4 for one token of many sequences; q reads before the write, which is then added.

    Shapes: qk (seqs, 2, heads, dim) · v, g, out (seqs, heads, dim) · beta (seqs, heads)
            memory (seqs, heads, dim, dim), changed in place
    """
    decay = np.exp(g)
    reads = np.matmul((qk * decay[:, None]).transpose(0, 2, 1, 3), memory)
    write = v - reads[:, :, 1]
    write *= beta[..., None]
    memory *= decay[..., None]
    memory += qk[:, 1, :, :, None] * write[:, :, None]
    np.multiply(write, np.vecdot(qk[:, 0], qk[:, 1])[..., None], out=out)
    out += reads[:, :, 0]


def _chunks(
    qk: Array, v: Array, g: Array, beta: Array, memory: Array, segment: Segment, out: Array
) -> None:
    """glm 5.6 for one sequence: all but the walk of the memory is one batch over chunks and heads.

    Arrays stay (chunks, tokens, heads, dim), as rows come; matmul reads them with heads outside.

    Shapes: as in `one_token`, over all rows of the step · memory (heads, dim, dim), one slot's
    """
    first, count = segment.first, segment.length
    heads, dim = v.shape[1:]
    part = slice(first, first + count)
    q, k, values, steps, strength = (
        _by_chunk(x[part]) for x in (qk[:, 0], qk[:, 1], v, g, beta[..., None])
    )
    chunks = len(q)

    # G: sums of log decay up to and with each token
    total = np.matmul(_LOWER, steps.reshape(chunks, CHUNK, -1)).reshape(q.shape)
    grown = np.exp(total)
    last = grown[:, -1, :, :, None].copy()  # (chunks, heads, dim, 1)
    left = np.empty((chunks, 2 * CHUNK, heads, dim), np.float32)
    np.multiply(k, grown, out=left[:, :CHUNK])
    np.multiply(q, grown, out=left[:, CHUNK:])
    if float(total[:, -1].min()) >= DECAY_LIMIT:
        shrunk = np.divide(k, grown, out=grown)
        pairs = np.matmul(_outside(left), shrunk.transpose(0, 2, 3, 1))
        remaining = shrunk
        remaining *= last[:, None, :, :, 0]
    else:
        pairs = _pairs_by_difference(_outside(q), _outside(k), _outside(total))
        remaining = k * np.exp(total[:, -1:] - total)
    attend = pairs[:, :, CHUNK:] * _LOWER
    system = pairs[:, :, :CHUNK] * _STRICT
    system *= _outside(strength)
    solve = _inverse(system)
    solve *= strength.transpose(0, 2, 3, 1)
    fresh = np.matmul(solve, _outside(values))  # U, and V' behind the walk
    walk = _outside(left)
    walk[:, :, :CHUNK] = np.matmul(
        solve, walk[:, :, :CHUNK]
    )  # W above Q e^G: what reads the memory

    reads = np.empty((chunks, heads, 2 * CHUNK, dim), np.float32)
    keep = remaining.transpose(0, 2, 3, 1)
    for chunk in range(chunks):
        np.matmul(walk[chunk], memory, out=reads[chunk])
        fresh[chunk] -= reads[chunk, :, :CHUNK]
        memory *= last[chunk]
        memory += np.matmul(keep[chunk], fresh[chunk])
    seen = np.matmul(attend, fresh)
    seen += reads[:, :, CHUNK:]
    out[part] = seen.transpose(0, 2, 1, 3).reshape(-1, heads, dim)[:count]


_LOWER = np.tril(np.ones((CHUNK, CHUNK), np.float32))
_STRICT = np.tril(np.ones((CHUNK, CHUNK), np.float32), -1)


def _by_chunk(x: Array) -> Array:
    """(count, heads, width) -> (chunks, CHUNK, heads, width), zeros behind the last row."""
    count = len(x)
    chunks = -(-count // CHUNK)
    if count == chunks * CHUNK:
        return x.reshape(chunks, CHUNK, *x.shape[1:])
    padded = np.empty((chunks * CHUNK, *x.shape[1:]), np.float32)
    padded[:count] = x
    padded[count:] = 0.0
    return padded.reshape(chunks, CHUNK, *x.shape[1:])


def _outside(x: Array) -> Array:
    """Heads before tokens, as a view."""
    return x.transpose(0, 2, 1, 3)


def _pairs_by_difference(q: Array, k: Array, total: Array) -> Array:
    """k.k and q.k with decay e^(G_i - G_j), for decays too fast to be split into two factors.

    Shapes: q, k, total (chunks, heads, CHUNK, dim) -> (chunks, heads, 2*CHUNK, CHUNK)
    """
    apart = total[:, :, :, None] - total[:, :, None]
    np.minimum(apart, 0.0, out=apart)
    np.exp(apart, out=apart)
    apart *= k[:, :, None]
    return np.concatenate([np.matmul(apart, x[..., None])[..., 0] for x in (k, q)], axis=2)


def _inverse(system: Array) -> Array:
    """(I + A)^-1 of strictly lower triangular A: two halves by substitution, then joined.

    Products such as (I - A)(I + A^2)... lose all digits when keys are alike.

    Shapes: system, result (chunks, heads, CHUNK, CHUNK)
    """
    half = CHUNK // 2
    a = system.reshape(-1, CHUNK, CHUNK)
    count = len(a)
    blocks = np.concatenate([a[:, :half, :half], a[:, half:, half:]]).reshape(2 * count, -1)
    # matrices innermost, so that each call works on long rows
    b = np.negative(blocks.T, order="C").reshape(half, half, 2 * count)
    inverse = np.zeros_like(b)
    inverse[0, 0] = 1.0
    for row in range(1, half):
        inverse[row, row] = 1.0
        np.add.reduce(b[row, :row, None] * inverse[:row, :row], axis=0, out=inverse[row, :row])
    done = np.ascontiguousarray(inverse.reshape(half * half, -1).T).reshape(-1, half, half)
    upper, lower = done[:count], done[count:]
    out = np.zeros_like(a)
    out[:, :half, :half] = upper
    out[:, half:, half:] = lower
    np.negative(np.matmul(lower, np.matmul(a[:, half:, :half], upper)), out=out[:, half:, :half])
    return out.reshape(system.shape)


def kda_out(o: Array, gate: Array, weight: Array, eps: float) -> Array:
    count, heads, dim = o.shape
    if gate.shape != (count, heads * dim) or weight.shape != (dim,):
        raise ShapeMismatch(f"o {o.shape}, gate {gate.shape}, weight {weight.shape}.")
    y = o * inverse_rms(o, eps)
    y *= weight
    y = y.reshape(count, heads * dim)
    y *= sigmoid(gate)
    return y

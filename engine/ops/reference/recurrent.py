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
        np.einsum("stc,tc->sc", seen, kernel, out=out[:decode])
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
    count, three, heads, dim = qkv.shape
    if three != 3 or g.shape != (count, heads, dim) or beta.shape != (count, heads):
        raise ShapeMismatch(f"qkv {qkv.shape}, g {g.shape}, beta {beta.shape}.")
    if state.shape[1:] != (heads, dim, dim):
        raise ShapeMismatch(f"state {state.shape} does not fit {heads} heads of {dim}.")
    for slot in rows.fresh_slots:
        state[slot] = 0.0
    qk = qkv[:, :2]
    norms = np.vecdot(qk, qk)
    norms += NORM_EPS
    np.sqrt(norms, out=norms)
    norms[:, 0] *= dim**0.5  # the query's own scale, behind its L2 norm
    qk = qk / norms[..., None]
    v = qkv[:, 2]

    out = np.empty((count, heads, dim), np.float32)
    decode = rows.decode
    if decode:
        memory = state[rows.decode_slots]
        _one_token(qk[:decode], v[:decode], g[:decode], beta[:decode], memory, out[:decode])
        if not isinstance(rows.decode_slots, slice):
            state[rows.decode_slots] = memory
    for segment in rows.segments[decode:]:
        _chunks(qk, v, g, beta, state[segment.slot], segment, out)
    return out


def _one_token(qk: Array, v: Array, g: Array, beta: Array, memory: Array, out: Array) -> None:
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

    Shapes: as in `_one_token`, over all rows of the step · memory (heads, dim, dim), one slot's
    """
    first, count = segment.first, segment.length
    heads, dim = v.shape[1:]
    part = slice(first, first + count)
    chunks = -(-count // CHUNK)

    def by_chunk(x: Array, planes: int) -> Array:
        """(count, planes, heads, width) -> (planes, chunks, heads, CHUNK, width), zeros behind."""
        padded = np.zeros((planes, chunks, heads, CHUNK, x.shape[-1]), np.float32)
        view = padded.transpose(1, 3, 0, 2, 4)  # (chunks, CHUNK, planes, heads, width)
        whole, rest = divmod(count, CHUNK)
        view[:whole] = x[: whole * CHUNK].reshape(whole, CHUNK, *x.shape[1:])
        if rest:
            view[whole, :rest] = x[whole * CHUNK :]
        return padded

    q, k = by_chunk(qk[part], 2)
    values, steps = by_chunk(v[part][:, None], 1)[0], by_chunk(g[part][:, None], 1)[0]
    strength = by_chunk(beta[part][:, None, :, None], 1)[0]  # (chunks, heads, CHUNK, 1)

    total = np.matmul(_LOWER, steps)  # G: sums of log decay up to and with each token
    grown = np.exp(total)
    last = grown[:, :, -1]  # (chunks, heads, dim)
    left = np.concatenate([k * grown, q * grown], axis=2)  # (chunks, heads, 2*CHUNK, dim)
    if float(total[:, :, -1].min()) >= DECAY_LIMIT:
        pairs = np.matmul(left, (k / grown).transpose(0, 1, 3, 2))
    else:
        pairs = _pairs_by_difference(q, k, total)
    attend = pairs[:, :, CHUNK:] * _LOWER
    system = pairs[:, :, :CHUNK] * _STRICT
    system *= strength

    right = np.concatenate([values, left[:, :, :CHUNK]], axis=3)
    right *= strength
    solved = np.matmul(_inverse(system), right)  # (chunks, heads, CHUNK, 2*dim): U | W
    fresh = solved[..., :dim]
    reads = left  # [W; Q e^G]: the keys' half is no longer needed
    reads[:, :, :CHUNK] = solved[..., dim:]
    remaining = k * np.exp(total[:, :, -1:] - total)
    remaining = remaining.transpose(0, 1, 3, 2)

    seen = np.empty((chunks, heads, CHUNK, dim), np.float32)
    for chunk in range(chunks):
        read = np.matmul(reads[chunk], memory)
        seen[chunk] = read[:, CHUNK:]
        fresh[chunk] -= read[:, :CHUNK]
        memory *= last[chunk, :, :, None]
        memory += np.matmul(remaining[chunk], fresh[chunk])
    seen += np.matmul(attend, fresh)
    out[part] = seen.transpose(0, 2, 1, 3).reshape(-1, heads, dim)[:count]


_LOWER = np.tril(np.ones((CHUNK, CHUNK), np.float32))
_STRICT = np.tril(np.ones((CHUNK, CHUNK), np.float32), -1)


def _pairs_by_difference(q: Array, k: Array, total: Array) -> Array:
    """k.k and q.k with decay e^(G_i - G_j), for decays too fast to be split into two factors."""
    apart = total[:, :, :, None] - total[:, :, None]
    np.minimum(apart, 0.0, out=apart)
    np.exp(apart, out=apart)
    apart *= k[:, :, None]
    return np.concatenate(
        [np.matmul(apart, x[..., None])[..., 0] for x in (k, q)],
        axis=2,
    )


def _inverse(system: Array) -> Array:
    """(I + A)^-1 of strictly lower triangular A, by forward substitution, matrices innermost.

    Products such as (I - A)(I + A^2)... lose all digits when keys are alike.

    Shapes: system, result (chunks, heads, CHUNK, CHUNK)
    """
    chunks, heads = system.shape[:2]
    a = np.ascontiguousarray(system.transpose(2, 3, 0, 1)).reshape(CHUNK, CHUNK, -1)
    np.negative(a, out=a)
    inverse = np.zeros_like(a)
    inverse[0, 0] = 1.0
    for row in range(1, CHUNK):
        inverse[row, row] = 1.0
        np.einsum("jn,jkn->kn", a[row, :row], inverse[:row, :row], out=inverse[row, :row])
    back = inverse.reshape(CHUNK, CHUNK, chunks, heads).transpose(2, 3, 0, 1)
    return np.ascontiguousarray(back)


def kda_out(o: Array, gate: Array, weight: Array, eps: float) -> Array:
    count, heads, dim = o.shape
    if gate.shape != (count, heads * dim) or weight.shape != (dim,):
        raise ShapeMismatch(f"o {o.shape}, gate {gate.shape}, weight {weight.shape}.")
    y = o * inverse_rms(o, eps)
    y *= weight
    y = y.reshape(count, heads * dim)
    y *= sigmoid(gate)
    return y

"""What each op means, in plain loops and float64: slow, obvious, independent of the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.device.device import Array
from engine.ops.spec import Rows


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    out = np.zeros((len(x), len(weight)))
    for row in range(len(x)):
        for column in range(len(weight)):
            out[row, column] = math.fsum(
                map(float.__mul__, x[row].tolist(), weight[column].tolist())
            )
            out[row, column] += 0.0 if bias is None else float(bias[column])
    return out


def head_linear(x: Array, weight: Array) -> Array:
    out = np.zeros((len(x), *weight.shape[::2]))
    for head in range(len(weight)):
        out[:, head] = linear(x[:, head], weight[head].T, None)
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    flat = x.astype(np.float64).reshape(-1, len(weight))
    for row in flat:
        row *= weight / math.sqrt(math.fsum(v * v for v in row.tolist()) / len(weight) + eps)
    return flat.reshape(x.shape)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    flat = x.astype(np.float64).reshape(-1, len(weight))
    for row in flat:
        row -= math.fsum(row.tolist()) / len(row)
    return rms_norm(flat.reshape(x.shape), weight, eps) + bias


def swiglu(gate_up: Array, limit: float | None) -> Array:
    inner = gate_up.shape[1] // 2
    out = np.zeros((len(gate_up), inner))
    bound = math.inf if limit is None else limit
    for row in range(len(gate_up)):
        for column in range(inner):
            gate = min(float(gate_up[row, column]), bound)
            up = max(min(float(gate_up[row, inner + column]), bound), -bound)
            out[row, column] = gate * sigmoid(gate) * up
    return out


def gelu(x: Array) -> Array:
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.ravel().tolist()])


def rotate_half(x: Array, cos: Array, sin: Array) -> Array:
    out = np.zeros(x.shape)
    half = x.shape[2] // 2
    for row, head, dim in np.ndindex(*x.shape):
        other = -x[row, head, dim + half] if dim < half else x[row, head, dim - half]
        out[row, head, dim] = (
            float(x[row, head, dim]) * cos[row, dim] + float(other) * sin[row, dim]
        )
    return out


def hyper(
    x: Array, fn: Array, base: Array, scale: Array, norm_eps: float, eps: float, rounds: int
) -> tuple[Array, Array, Array]:
    """pre (rows, n), post (rows, n), comb (rows, n, n) of streams x (rows, n, hidden)."""
    rows, n, _ = x.shape
    pre, post, comb = np.zeros((rows, n)), np.zeros((rows, n)), np.zeros((rows, n, n))
    for row in range(rows):
        f = x[row].astype(np.float64).ravel()
        f = f / math.sqrt((f * f).mean() + norm_eps)
        m = fn.astype(np.float64) @ f
        for i in range(n):
            pre[row, i] = sigmoid(m[i] * scale[0] + base[i]) + eps
            post[row, i] = 2 * sigmoid(m[n + i] * scale[1] + base[n + i])
        c = m[2 * n :].reshape(n, n) * scale[2] + base[2 * n :].reshape(n, n)
        for i in range(n):
            line = np.exp(c[i] - c[i].max())
            c[i] = line / line.sum() + eps
        for turn in range(rounds):
            if turn:
                for i in range(n):
                    c[i] /= c[i].sum() + eps
            for j in range(n):
                c[:, j] /= c[:, j].sum() + eps
        comb[row] = c
    return pre, post, comb


def hyper_out(x: Array, y: Array, post: Array, comb: Array) -> Array:
    out = np.zeros(x.shape)
    for row, j in np.ndindex(*post.shape):
        out[row, j] = post[row, j] * y[row]
        for i in range(post.shape[1]):
            out[row, j] += comb[row, i, j] * x[row, i].astype(np.float64)
    return out


def short_conv(x: Array, kernel: Array, window: Array, rows: Rows) -> tuple[Array, Array]:
    out, window = np.zeros(x.shape), window.astype(np.float64)
    taps = len(kernel)
    for number, (first, length, _, slot) in enumerate(rows.segments):
        if rows.fresh[number]:
            window[slot] = 0
        for row in range(first, first + length):
            seen = [*window[slot], x[row].astype(np.float64)]
            for channel in range(x.shape[1]):
                y = math.fsum(float(kernel[j, channel]) * seen[j][channel] for j in range(taps))
                out[row, channel] = y * sigmoid(y)
            window[slot] = seen[1:]
    return out, window


def kda_gates(
    f: Array, b: Array, rate: Array, dt_bias: Array, lower_bound: float | None
) -> tuple[Array, Array]:
    g, beta = np.zeros(f.shape), np.zeros(b.shape)
    for row, channel in np.ndindex(*f.shape):
        y = float(f[row, channel]) + float(dt_bias[channel])
        if lower_bound is None:
            g[row, channel] = -rate[channel] * (y if y > 20 else math.log1p(math.exp(y)))
        else:
            g[row, channel] = lower_bound * sigmoid(float(rate[channel]) * y)
    for row, head in np.ndindex(*b.shape):
        beta[row, head] = sigmoid(float(b[row, head]))
    return g.reshape(len(b), b.shape[1], -1), beta


def kda(qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> tuple[Array, Array]:
    """Token by token (glm5_next.md 5.4)."""
    out, state = np.zeros(g.shape), state.astype(np.float64)
    for number, (first, length, _, slot) in enumerate(rows.segments):
        if rows.fresh[number]:
            state[slot] = 0
        for row in range(first, first + length):
            for head in range(g.shape[1]):
                q, k, v = qkv[row, :, head].astype(np.float64)
                q = q / math.sqrt((q * q).sum() + 1e-6) * len(q) ** -0.5
                k = k / math.sqrt((k * k).sum() + 1e-6)
                memory = state[slot, head]
                memory *= np.exp(g[row, head].astype(np.float64))[:, None]
                memory += np.outer(k, beta[row, head] * (v - memory.T @ k))
                out[row, head] = memory.T @ q
    return out, state


def kda_out(o: Array, gate: Array, weight: Array, eps: float) -> Array:
    normed = rms_norm(o, weight, eps).reshape(len(o), -1)
    for row, channel in np.ndindex(*normed.shape):
        normed[row, channel] *= sigmoid(float(gate[row, channel]))
    return normed


def place_of(rows: Rows, sequence: int, position: int) -> tuple[int, int]:
    page, offset = divmod(position, rows.page_tokens)
    return int(rows.table[sequence, page]), offset


def each_row(rows: Rows) -> list[tuple[int, int, int]]:
    """(row, sequence, position) of every row."""
    return [
        (first + i, number, context + i)
        for number, (first, length, context, _) in enumerate(rows.segments)
        for i in range(length)
    ]


def pool_key(
    keys: Array, gates: Array, valid: Array, ape: Array, rows: Rows, sequence: int, pool: int
) -> Array:
    """R18: softmax over the pool's valid tokens, channel by channel."""
    tokens, dim = ape.shape
    places = [place_of(rows, sequence, pool * tokens + slot) for slot in range(tokens)]
    real = [slot for slot, place in enumerate(places) if valid[place]]
    out = np.zeros(dim)
    for channel in range(dim):
        weights = {
            slot: math.exp(float(gates[places[slot]][channel]) + float(ape[slot, channel]))
            for slot in real
        }
        for slot in real:
            share = weights[slot] / math.fsum(weights.values())
            out[channel] += share * float(keys[places[slot]][channel])
    return out


def select(
    q: Array, head_weights: Array, pooled: Array, rows: Rows, pool: int, top_tokens: int
) -> Array:
    """R19 to R23, by sorting: best score first, then the lower pool."""
    out = np.full((len(q), top_tokens + pool - 1), -1)
    for row, sequence, position in each_row(rows):
        visible = position + 1
        ranked = []
        for number in range(visible // pool):
            page, offset = place_of(rows, sequence, number * pool)
            dots = q[row].astype(np.float64) @ pooled[page, offset // pool].astype(np.float64)
            relu = np.maximum(dots * q.shape[2] ** -0.5, 0)
            ranked.append((-float(head_weights[row].astype(np.float64) @ relu), number))
        best = sorted(number for _, number in sorted(ranked)[: top_tokens // pool])
        tokens = [number * pool + slot for number in best for slot in range(pool)]
        tokens += range(visible - visible % pool, visible)
        out[row, : len(tokens)] = tokens
    return out


def attention(q: Array, keys: Sequence[Array], scale: float) -> Array:
    """Softmax of q (heads, dim) over rows, which are keys and values at once."""
    stack = np.array(keys, np.float64)
    out = np.zeros(q.shape)
    for head in range(len(q)):
        scores = stack @ q[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ stack / weights.sum()
    return out


def latent_attention(
    q: Array, latents: Array, selected: Array | None, rows: Rows, scale: float
) -> Array:
    out = np.zeros(q.shape)
    for row, sequence, position in each_row(rows):
        seen = range(position + 1) if selected is None else [p for p in selected[row] if p >= 0]
        out[row] = attention(q[row], [latents[place_of(rows, sequence, p)] for p in seen], scale)
    return out


def segment_attention(q: Array, k: Array, v: Array, segments: Sequence[int], scale: float) -> Array:
    out, first = np.zeros(q.shape), 0
    for length in segments:
        for row in range(first, first + length):
            for head in range(q.shape[1]):
                part = slice(first, first + length)
                scores = k[part, head].astype(np.float64) @ q[row, head] * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[part, head] / weights.sum()
        first += length
    return out


def route(
    logits: Array, bias: Array, active: int, scale: float, normalise: bool, groups: int, top: int
) -> tuple[Array, Array]:
    count = logits.shape[1]
    ids = np.zeros((len(logits), active), np.int64)
    weights = np.zeros((len(logits), active))
    for row in range(len(logits)):
        scores = [sigmoid(float(v)) for v in logits[row]]
        biased = [s + float(b) for s, b in zip(scores, bias, strict=True)]
        size = count // groups
        totals = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-totals[g], g))[:top]
        allowed = [e for e in range(count) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:active]
        total = sum(scores[e] for e in chosen) + 1e-20 if normalise else 1.0
        ids[row] = chosen
        weights[row] = [scores[e] / total * scale for e in chosen]
    return ids, weights


def experts(
    x: Array,
    chosen: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    shared: tuple[Array, Array],
    limit: float | None,
) -> Array:
    out = np.zeros(x.shape)
    for row in range(len(x)):
        one = x[row : row + 1]
        parts = [(shared[0], shared[1], 1.0)]
        for expert, weight in zip(chosen[row], weights[row], strict=True):
            parts.append((gate_up[expert], down[expert], float(weight)))
        for into, back, weight in parts:
            act = swiglu(one.astype(np.float64) @ into.T.astype(np.float64), limit)
            out[row] += weight * (act @ back.T.astype(np.float64))[0]
    return out

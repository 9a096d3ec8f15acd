"""plain NumPy: DSA scores and top-k positions."""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.reference.attention import gather, pages_of
from engine.ops.spec import Rows

SCORE_ELEMENTS = 1 << 20  # of one block of scores; bounds the scratch at any context


def index_write(
    keys: Array, gates: Array, valid: Array, key: Array, gate: Array, rows: Rows
) -> None:
    if keys.shape != gates.shape or valid.shape != keys.shape[:2] or key.shape != gate.shape:
        raise ShapeMismatch(f"keys {keys.shape}, gates {gates.shape}, valid {valid.shape}.")
    if key.shape != (len(rows.places), keys.shape[2]):
        raise ShapeMismatch(f"key {key.shape} does not fit {len(rows.places)} rows.")
    keys.reshape(-1, keys.shape[2])[rows.places] = key
    gates.reshape(-1, gates.shape[2])[rows.places] = gate
    valid.reshape(-1)[rows.places] = 1


def index_pool(
    pooled: Array, keys: Array, gates: Array, valid: Array, ape: Array, rows: Rows
) -> None:
    pool, dim = ape.shape
    if keys.shape[1] % pool or pooled.shape[1:] != (keys.shape[1] // pool, dim):
        raise ShapeMismatch(f"pooled {pooled.shape}, keys {keys.shape}, ape {ape.shape}.")
    complete = rows.places[rows.positions % pool == pool - 1] // pool
    if not len(complete):
        return
    weights = gates.reshape(-1, pool, dim)[complete] + ape
    real = valid.reshape(-1, pool)[complete].astype(bool)
    if not real.all():
        weights[~real] = -np.inf
    top = weights.max(axis=1, keepdims=True)
    weights -= np.where(np.isfinite(top), top, 0.0)
    np.exp(weights, out=weights)
    total = np.add.reduce(weights, axis=1)
    weights *= np.where(weights > 0.0, keys.reshape(-1, pool, dim)[complete], 0.0)
    key = np.add.reduce(weights, axis=1)
    pooled.reshape(-1, dim)[complete] = key / np.where(total > 0.0, total, 1.0)


def index_select(
    q: Array, head_weights: Array, pooled: Array, rows: Rows, *, pool: int, top_tokens: int
) -> Array | None:
    if head_weights.shape != q.shape[:2] or pooled.shape[2] != q.shape[2]:
        raise ShapeMismatch(f"q {q.shape}, weights {head_weights.shape}, pooled {pooled.shape}.")
    width = top_tokens + pool - 1
    if all(s.context + s.length <= width for s in rows.segments):
        return None
    visible = (rows.positions + 1)[:, None]
    line = np.arange(width, dtype=np.int32)
    selected = np.where(line < visible, line, np.int32(-1))  # right for short rows
    keep = top_tokens // pool
    for number, (first, count, context, _) in enumerate(rows.segments):
        if context + count <= width:
            continue
        long = max(first, first + width - context)  # rows before see no more than `width` tokens
        pools = (context + count) // pool
        keys = gather(pooled, pages_of(rows, number, context + count), pools).T
        block = max(1, SCORE_ELEMENTS // (q.shape[1] * pools))
        for start in range(long, first + count, block):
            part = slice(start, min(start + block, first + count))
            best = _best_pools(q[part], head_weights[part], keys, visible[part] // pool, keep)
            seats = best[:, :, None] * pool + np.arange(pool, dtype=np.int32)
            selected[part, :top_tokens] = seats.reshape(len(best), top_tokens)
            tail = visible[part] // pool * pool + np.arange(pool - 1, dtype=np.int32)
            selected[part, top_tokens:] = np.where(tail < visible[part], tail, -1)
    return selected


def _best_pools(q: Array, head_weights: Array, keys: Array, visible: Array, keep: int) -> Array:
    """The `keep` best of each row's visible pools, in order of pool number.

    Shapes: q (rows, heads, dim) · keys (dim, pools) · visible (rows, 1), more than `keep`
            result (rows, keep) i32
    """
    scores = pool_scores(q, head_weights, keys)
    pools = scores.shape[1]
    scores[np.arange(pools) >= visible] = -np.inf
    edge = np.partition(scores, pools - keep, axis=1)[:, pools - keep, None]
    taken = scores >= edge
    if np.count_nonzero(taken) > keep * len(scores):  # equals at the edge: the lower pools
        above = scores > edge
        equal = scores == edge
        room = keep - np.add.reduce(above, axis=1, dtype=np.int64, keepdims=True)
        taken = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return np.nonzero(taken)[1].astype(np.int32).reshape(len(scores), keep)


def pool_scores(q: Array, head_weights: Array, keys: Array) -> Array:
    """Score of each pool for each row (R20). Shapes: keys (dim, pools) · result (rows, pools)."""
    rows, heads, dim = q.shape
    scores = np.dot((q * dim**-0.5).reshape(rows * heads, dim), keys)
    np.maximum(scores, 0.0, out=scores)
    return np.matmul(head_weights[:, None], scores.reshape(rows, heads, -1))[:, 0]

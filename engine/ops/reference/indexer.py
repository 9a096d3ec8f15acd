"""plain NumPy: DSA scores and top-k positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.reference.attention import decode_groups, gather, gather_group
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


def pool_scores(q: Array, head_weights: Array, keys: Array) -> Array:
    """Score of each pool for each row (R20).

    Shapes: q (rows, heads, dim) · keys (pools, dim), or (rows, pools, dim) of each row's own
            result (rows, pools)
    """
    rows, heads, dim = q.shape
    q = q * np.float32(dim**-0.5)
    if keys.ndim == 2:
        scores = np.dot(q.reshape(rows * heads, dim), keys.T).reshape(rows, heads, -1)
    else:
        scores = np.matmul(q, keys.transpose(0, 2, 1))
    np.maximum(scores, 0.0, out=scores)
    return np.matmul(head_weights[:, None], scores)[:, 0]


def index_select(
    q: Array,
    head_weights: Array,
    pooled: Array,
    rows: Rows,
    *,
    pool: int,
    top_tokens: int,
    score: Callable[[Array, Array, Array], Array] = pool_scores,
) -> Array | None:
    if head_weights.shape != q.shape[:2] or pooled.shape[2] != q.shape[2]:
        raise ShapeMismatch(f"q {q.shape}, weights {head_weights.shape}, pooled {pooled.shape}.")
    width = top_tokens + pool - 1
    if all(s.context + s.length <= width for s in rows.segments):
        return None
    visible = (rows.positions + 1)[:, None]
    line = np.arange(width, dtype=np.int32)
    selected = np.where(line < visible, line, np.int32(-1))  # right for short rows
    alone = rows.decode if rows.decode > 1 else 0  # decode rows that go in groups
    if alone:
        for group, pages in decode_groups(rows):
            long = group[rows.context[group] >= width]
            if len(long):
                counts = (rows.context[long] + 1) // pool
                keys, _ = gather_group(pooled, rows.table[long, :pages], counts)
                scores = score(q[long], head_weights[long], keys)
                selected[long] = _chosen(scores, visible[long], pool, top_tokens)
    for number, (first, count, context, _) in enumerate(rows.segments[alone:], alone):
        end = context + count
        if end <= width:
            continue
        start = max(first, first + width - context)  # rows before see no more than `width` tokens
        keys = gather(pooled, rows, number, end, end // pool)
        block = max(1, SCORE_ELEMENTS // (q.shape[1] * len(keys)))
        for at in range(start, first + count, block):
            part = slice(at, min(at + block, first + count))
            scores = score(q[part], head_weights[part], keys)
            selected[part] = _chosen(scores, visible[part], pool, top_tokens)
    return selected


def _chosen(scores: Array, visible: Array, pool: int, top_tokens: int) -> Array:
    """Output rows of `index_select` from scores; each row sees more pools than it may keep.

    Shapes: scores (rows, pools), changed · visible (rows, 1), in tokens
    """
    rows, pools = scores.shape
    keep = top_tokens // pool
    scores[np.arange(pools) >= visible // pool] = -np.inf
    edge = np.partition(scores, pools - keep, axis=1)[:, pools - keep, None]
    taken = scores >= edge
    if np.count_nonzero(taken) > keep * rows:  # equals at the edge: the lower pools
        above = scores > edge
        equal = scores == edge
        room = keep - np.add.reduce(above, axis=1, dtype=np.int64, keepdims=True)
        taken = above | (equal & (np.cumsum(equal, axis=1) <= room))
    best = np.flatnonzero(taken).reshape(rows, keep) - np.arange(rows)[:, None] * pools
    seats = (best[:, :, None] * pool + np.arange(pool)).reshape(rows, -1)
    tail = visible // pool * pool + np.arange(pool - 1)
    return np.concatenate([seats, np.where(tail < visible, tail, -1)], axis=1)

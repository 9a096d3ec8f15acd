"""latent attention, dense or through the DSA indexer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cache.indexer import IndexCursor
from engine.device.device import Array
from engine.models.state import LatentState
from engine.ops.spec import Ops, Packed, Rows, Segment
from engine.spec import Latent


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of one layer.

    Shapes: inputs: query low rank | latent | index key | index gate | index head weights,
                    (query_rank + rank + 2*dim + index heads, hidden); the factor heads^-0.5 of the
                    head weights is folded in
            queries: attention | index, (heads*key_dim + index heads*dim, query_rank)
            keys: (heads, key_dim, rank), takes a query to latent space (absorbed form)
            values: (heads, rank, value_dim) · out (hidden, heads*value_dim)
            query_norm (query_rank,) · latent_norm (rank,) · key_norm, key_bias (dim,)
            ape (pool, dim)
    """

    inputs: Packed
    queries: Packed
    keys: Packed
    values: Packed
    out: Packed
    query_norm: Array
    latent_norm: Array
    key_norm: Array
    key_bias: Array
    ape: Array


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a pass attended to: selected positions, or all that `rows` may see."""

    selected: Array | None
    rows: Rows


def mix(
    h: Array,
    rows: Rows,
    w: LatentWeights,
    state: LatentState,
    spec: Latent,
    eps: float,
    ops: Ops,
    sight: Sight | None = None,
) -> tuple[Array, Sight]:
    """Latent attention (glm5_next.md 6); writes the rows' latents and index rows.

    With a `sight`, the rows attend to that instead of what the indexer selects for them.

    Shapes: h, result (rows, hidden)
    Raises: RowsMissing, CapacityExceeded before anything is written (R26, R27).
    """
    index, dim = spec.indexer, spec.indexer.dim
    count, cut = len(h), spec.query_rank + spec.rank
    cursors = state.begin_step(rows)
    projected = ops.linear(h, w.inputs)
    low = ops.rms_norm(projected[:, : spec.query_rank], w.query_norm, eps)
    latent = ops.rms_norm(projected[:, spec.query_rank : cut], w.latent_norm, eps)
    key = ops.layer_norm(projected[:, cut : cut + dim], w.key_norm, w.key_bias, index.key_norm_eps)
    gate = projected[:, cut + dim : cut + 2 * dim]

    ops.write_rows(state.latents.pages, latent, rows)
    pages = state.index
    ops.index_write(pages.keys, pages.gates, pages.valid, key, gate, rows)
    for cursor, segment in zip(cursors, rows.segments, strict=True):
        cursor.advance(segment.length)
    _pool(rows, cursors, w, state, spec, ops)

    split = spec.heads * spec.key_dim
    queries = ops.linear(low, w.queries)
    if sight is None:
        selected = ops.index_select(
            queries[:, split:].reshape(count, index.heads, dim),
            projected[:, cut + 2 * dim :],
            pages.pooled,
            rows,
            pool=index.pool,
            top_tokens=index.top_tokens,
        )
        sight = Sight(selected, rows)
    absorbed = ops.head_linear(queries[:, :split].reshape(count, spec.heads, -1), w.keys)
    seen = ops.latent_attention(
        absorbed, state.latents.pages, sight.selected, sight.rows, scale=spec.key_dim**-0.5
    )
    heads = ops.head_linear(seen, w.values)
    return ops.linear(heads.reshape(count, -1), w.out), sight


def _pool(
    rows: Rows,
    cursors: list[IndexCursor],
    w: LatentWeights,
    state: LatentState,
    spec: Latent,
    ops: Ops,
) -> None:
    """Keep the keys of all pools that are complete now (R25)."""
    pool, pages = spec.indexer.pool, state.index
    buffers = (pages.pooled, pages.keys, pages.gates, pages.valid, w.ape)
    ops.index_pool(*buffers, rows)
    for number, (cursor, segment) in enumerate(zip(cursors, rows.segments, strict=True)):
        known = segment.context // pool
        if cursor.pooled < known:  # rows came from a snapshot, which holds no pool keys
            first = cursor.pooled * pool
            ops.index_pool(*buffers, _stretch(rows, number, segment, first, known * pool))
        cursor.mark_pooled()


def _stretch(rows: Rows, number: int, segment: Segment, first: int, end: int) -> Rows:
    """Rows [first, end) of one sequence, as geometry alone."""
    return Rows(
        starts=np.array([0, end - first], np.int32),
        context=np.array([first], np.int32),
        slots=np.array([segment.slot], np.int32),
        table=rows.table[number : number + 1],
        fresh=np.zeros(1, bool),
        decode=0,
        page_tokens=rows.page_tokens,
    )


def last_sight(sight: Sight) -> Sight:
    """The same for the last row of a pass over one sequence, to be used by rows that follow."""
    rows = sight.rows
    (segment,) = rows.segments
    end = segment.context + segment.length
    selected = None if sight.selected is None else sight.selected[-1:]
    return Sight(selected, _stretch(rows, 0, segment, end - 1, end))

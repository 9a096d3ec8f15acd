"""plain NumPy: paged latent attention, dense or over selected rows, and segments."""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.spec import Rows

MASKED_KEYS = 1024  # up to so many keys, all with a mask cost less than gathering the selected
QUERY_BLOCK = 128  # rows scored at once; those before the diagonal block are not computed
GATHER_ELEMENTS = 1 << 21  # of one block of gathered rows


def write_rows(pages: Array, values: Array, rows: Rows) -> None:
    if values.shape != (len(rows.places), pages.shape[2]):
        raise ShapeMismatch(f"rows {values.shape} do not fit {len(rows.places)} places.")
    pages.reshape(-1, pages.shape[2])[rows.places] = values


def pages_of(rows: Rows, sequence: int, tokens: int) -> Array:
    """The page ids that hold a sequence's first `tokens` rows."""
    return rows.table[sequence, : -(-tokens // rows.page_tokens)]


def gather(pages: Array, ids: Array, count: int) -> Array:
    """The first `count` rows of some pages. Shapes: pages (pages, n, width) -> (count, width)."""
    if len(ids) == 1:
        return pages[ids[0], :count]
    return pages[ids].reshape(-1, pages.shape[2])[:count]


def latent_attention(
    q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
) -> Array:
    if q.shape[2] != latents.shape[2] or len(q) != int(rows.starts[-1]):
        raise ShapeMismatch(f"q {q.shape} does not fit latents {latents.shape}.")
    if selected is not None and len(selected) != len(q):
        raise ShapeMismatch(f"selected {selected.shape} does not fit q {q.shape}.")
    q = q * np.float32(scale)
    out = np.empty(q.shape, np.float32)
    for number, segment in enumerate(rows.segments):
        first, count, context, _ = segment
        part = slice(first, first + count)
        if selected is None:
            keys = gather(latents, pages_of(rows, number, context + count), context + count)
            _causal(q[part], keys, context, out[part])
        elif count > 1 and context + count <= MASKED_KEYS:
            keys = gather(latents, pages_of(rows, number, context + count), context + count)
            _masked(q[part], keys, selected[part], out[part])
        else:
            _gathered(q[part], latents, rows.table[number], selected[part], out[part])
    return out


def attend(q: Array, keys: Array, values: Array, hidden: Array | None) -> Array:
    """softmax(q keys^T) values, `hidden` pairs left out.

    Shapes: q (..., rows, dim) · keys, values (..., n, dim) · hidden broadcasts to (..., rows, n)
    """
    scores = np.matmul(q, keys.swapaxes(-1, -2))
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    out = np.matmul(scores, values)
    out /= total
    return out


def _causal(q: Array, keys: Array, context: int, out: Array) -> None:
    """Row i sees keys [0, context + i]."""
    count, heads, rank = q.shape
    if count == 1:
        out[0] = attend(q[0], keys, keys, None)
        return
    for start in range(0, count, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, count)
        seen = keys[: context + end]
        row = np.arange(start, end).repeat(heads)[:, None] + context
        hidden = np.arange(len(seen)) > row
        block = attend(q[start:end].reshape(-1, rank), seen, seen, hidden)
        out[start:end] = block.reshape(end - start, heads, rank)


def _masked(q: Array, keys: Array, selected: Array, out: Array) -> None:
    """All keys, those that a row did not select left out."""
    count, heads, rank = q.shape
    hidden = np.ones((count, len(keys) + 1), bool)  # column 0 catches the -1s
    hidden[np.arange(count)[:, None], selected + 1] = False
    by_head = np.repeat(hidden[:, 1:], heads, axis=0)
    out[:] = attend(q.reshape(-1, rank), keys, keys, by_head).reshape(count, heads, rank)


def _gathered(q: Array, latents: Array, table: Array, selected: Array, out: Array) -> None:
    """Only the selected rows, in blocks of the step's rows."""
    page_tokens, rank = latents.shape[1:]
    flat = latents.reshape(-1, rank)
    block = max(1, GATHER_ELEMENTS // (selected.shape[1] * rank))
    for start in range(0, len(q), block):
        chosen = selected[start : start + block]
        none = chosen < 0
        page, offset = np.divmod(np.maximum(chosen, 0), page_tokens)
        keys = flat[table[page].astype(np.int64) * page_tokens + offset]
        hidden = none[:, None] if none.any() else None
        out[start : start + block] = attend(q[start : start + block], keys, keys, hidden)


def segment_attention(
    q: Array, k: Array, v: Array, segments: tuple[int, ...], *, scale: float
) -> Array:
    if q.shape != k.shape or k.shape != v.shape or sum(segments) != len(q):
        raise ShapeMismatch(f"q {q.shape}, k {k.shape}, v {v.shape} in segments of {segments}.")
    out = np.empty(q.shape, np.float32)
    by_head = [x.transpose(1, 0, 2) for x in (q * np.float32(scale), k, v)]
    first = 0
    for count in segments:
        queries, keys, values = (x[:, first : first + count] for x in by_head)
        out[first : first + count] = attend(queries, keys, values, None).transpose(1, 0, 2)
        first += count
    return out

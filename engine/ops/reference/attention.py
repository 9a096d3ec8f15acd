"""plain NumPy: paged latent attention, dense or over selected rows, and segments."""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.spec import Rows

MASKED_WIDTHS = 2.5  # up to so many selections' worth of keys, a mask over all beats gathering
QUERY_BLOCK = 128  # rows scored at once; those before the diagonal block are not computed
GATHER_ELEMENTS = 1 << 19  # of one block of gathered rows, 2 MB


def write_rows(pages: Array, values: Array, rows: Rows) -> None:
    if values.shape != (len(rows.places), pages.shape[2]):
        raise ShapeMismatch(f"rows {values.shape} do not fit {len(rows.places)} places.")
    pages.reshape(-1, pages.shape[2])[rows.places] = values


def gather(pages: Array, rows: Rows, sequence: int, tokens: int, count: int) -> Array:
    """The first `count` rows of a sequence of `tokens` tokens.

    Shapes: pages (pages, n, width), n rows a page · result (count, width)
    """
    ids = rows.table[sequence, : -(-tokens // rows.page_tokens)]
    if len(ids) == 1:
        return pages[ids[0], :count]
    return pages[ids].reshape(-1, pages.shape[2])[:count]


def decode_groups(rows: Rows) -> list[tuple[Array, int]]:
    """Decode rows with equally many pages, so that no sequence is padded to another's length.

    Result: (rows of the group, pages of each)
    """
    by_pages: dict[int, list[int]] = {}
    for row, segment in enumerate(rows.segments[: rows.decode]):
        by_pages.setdefault(segment.context // rows.page_tokens + 1, []).append(row)
    return [(np.array(group), pages) for pages, group in by_pages.items()]


def gather_group(pages: Array, table: Array, counts: Array) -> tuple[Array, Array]:
    """Whole pages of several sequences, and which of their rows are beyond each one's count.

    Shapes: table (seqs, pages) · counts (seqs,), all but the last page full
            result (seqs, n, width), zeros beyond the counts, and (seqs, n) bool
    """
    seqs, per_page = len(table), pages.shape[1]
    keys = pages[table].reshape(seqs, -1, pages.shape[2])
    hidden = np.arange(keys.shape[1]) >= counts[:, None]
    keys[:, -per_page:][hidden[:, -per_page:]] = 0.0  # what was never written may be NaN
    return keys, hidden


def latent_attention(
    q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
) -> Array:
    check_latent(q, latents, selected, rows)
    q = q * np.float32(scale)
    out = np.empty(q.shape, np.float32)
    alone = rows.decode if rows.decode > 1 else 0  # decode rows that go in groups
    if alone and selected is None:
        for group, pages in decode_groups(rows):
            keys, hidden = gather_group(latents, rows.table[group, :pages], rows.context[group] + 1)
            out[group] = attend(q[group], keys, keys, hidden[:, None])
    elif alone and selected is not None:
        part = slice(0, alone)
        _gathered(q[part], latents, rows, rows.owners[part], selected[part], out[part])
    for number, (first, count, context, _) in enumerate(rows.segments[alone:], alone):
        part, seen = slice(first, first + count), context + count
        if selected is None or (count > 1 and seen <= MASKED_WIDTHS * selected.shape[1]):
            keys = gather(latents, rows, number, seen, seen)
            chosen = None if selected is None else selected[part]
            _all_keys(q[part], keys, context, chosen, out[part])
        else:
            _gathered(q[part], latents, rows, rows.owners[part], selected[part], out[part])
    return out


def check_latent(q: Array, latents: Array, selected: Array | None, rows: Rows) -> None:
    """Raises `ShapeMismatch`."""
    if q.shape[2] != latents.shape[2] or len(q) != int(rows.starts[-1]):
        raise ShapeMismatch(f"q {q.shape} does not fit latents {latents.shape}.")
    if selected is not None and len(selected) != len(q):
        raise ShapeMismatch(f"selected {selected.shape} does not fit q {q.shape}.")


def attend(q: Array, keys: Array, values: Array, hidden: Array | None) -> Array:
    """softmax(q keys^T) values, `hidden` pairs left out.

    Shapes: q (..., rows, dim) · keys, values (..., n, dim) · hidden broadcasts to (..., rows, n)
    """
    scores = np.matmul(q, keys.swapaxes(-1, -2))
    if hidden is not None:
        np.copyto(scores, -np.inf, where=hidden)
    return _weigh(scores, values)


def _weigh(scores: Array, values: Array) -> Array:
    """softmax(scores) values; the division comes last, where it is smallest. Scores are changed."""
    scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    out = np.matmul(scores, values)
    out /= total
    return out


def _all_keys(q: Array, keys: Array, context: int, selected: Array | None, out: Array) -> None:
    """Row i sees keys [0, context + i], or those of them that it selected.

    In blocks of rows, so that keys behind a block's last row are not computed.
    """
    count, heads, rank = q.shape
    if count == 1:
        out[0] = attend(q[0], keys, keys, None)
        return
    for start in range(0, count, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, count)
        seen = keys[: context + end]
        if selected is None:
            hidden = np.arange(len(seen)) > np.arange(context + start, context + end)[:, None]
        else:
            column = np.ones((end - start, len(seen) + 1), bool)  # column 0 catches the -1s
            column[np.arange(end - start)[:, None], selected[start:end] + 1] = False
            hidden = column[:, 1:]
        scores = np.dot(q[start:end].reshape(-1, rank), seen.T).reshape(end - start, heads, -1)
        np.copyto(scores, -np.inf, where=hidden[:, None])
        block = _weigh(scores.reshape(-1, len(seen)), seen)
        out[start:end] = block.reshape(end - start, heads, rank)


def _gathered(
    q: Array, latents: Array, rows: Rows, owners: Array, selected: Array, out: Array
) -> None:
    """Only the selected rows, in blocks of queries; owners: the sequence of each query."""
    page_tokens, rank = latents.shape[1:]
    flat = latents.reshape(-1, rank)
    block = max(1, GATHER_ELEMENTS // (selected.shape[1] * rank))
    for start in range(0, len(q), block):
        part = slice(start, start + block)
        none = selected[part] < 0
        page, offset = np.divmod(np.maximum(selected[part], 0), page_tokens)
        places = rows.table[owners[part, None], page].astype(np.int64) * page_tokens + offset
        keys = np.take(flat, places, axis=0)  # half the time of indexing
        out[part] = attend(q[part], keys, keys, none[:, None] if none.any() else None)


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

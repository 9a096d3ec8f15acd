"""exact NumPy: each row attends to its own list of keys, in blocks counted from the list's start.

A call is one row's heads by BLOCK keys. Sums of a block have one order, blocks are added one by
one, and keys that fill a block up weigh exactly 0: what else is in the step, where a prompt was
cut, and whether a list was selected or is simply all positions, cannot be seen in the result.
"""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.ops.reference.attention import GATHER_ELEMENTS, check_latent, gather
from engine.ops.spec import Rows

BLOCK = 64  # keys, or pools


def latent_attention(
    q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
) -> Array:
    check_latent(q, latents, selected, rows)
    q = q * np.float32(scale)
    out = np.empty(q.shape, np.float32)
    visible = rows.positions + 1
    listed = np.arange(len(q))
    if selected is None:
        listed = listed[: rows.decode]
        _all_positions(q, latents, rows, rows.decode, visible, out)
        lists = _first(visible[: rows.decode], int(visible[: rows.decode].max(initial=0)))
    else:
        lists = selected
    if len(listed):
        _by_lists(q, latents, rows, listed, lists, out)
    return out


def _first(visible: Array, width: int) -> Array:
    """Lists of all that rows may see. Shapes: visible (rows,) -> (rows, width), -1 behind each."""
    line = np.arange(width, dtype=np.int32)
    return np.where(line < visible[:, None], line, np.int32(-1))


def _all_positions(
    q: Array, latents: Array, rows: Rows, first: int, visible: Array, out: Array
) -> None:
    """Prompt rows, from sequence `first` on, that see every position up to their own.

    Rows of one block of positions share their keys, which are gathered once a sequence.
    """
    for number, (start, count, context, _) in enumerate(rows.segments[first:], first):
        end = context + count
        keys = np.zeros((-(-end // BLOCK) * BLOCK, latents.shape[2]), np.float32)
        keys[:end] = gather(latents, rows, number, end, end)
        for lower in range(context // BLOCK * BLOCK, end, BLOCK):
            upper = lower + BLOCK
            part = slice(start + max(lower, context) - context, start + min(upper, end) - context)
            hidden = np.arange(upper) >= visible[part, None]
            out[part] = attend(q[part], keys[None, :upper], hidden)


def _by_lists(
    q: Array, latents: Array, rows: Rows, wanted: Array, lists: Array, out: Array
) -> None:
    """Rows with a list each: those with equally many blocks together, so that none is padded.

    Shapes: wanted (n,) numbers of rows · lists (n, width) positions, -1 where there is none
    """
    page_tokens, rank = latents.shape[1:]
    flat = latents.reshape(-1, rank)
    width = lists.shape[1]
    blocks = -(-(width - (lists[:, ::-1] >= 0).argmax(axis=1)) // BLOCK)
    for count in sorted(set(blocks.tolist())):
        seats = count * BLOCK
        group = np.flatnonzero(blocks == count)
        step = max(1, GATHER_ELEMENTS // (seats * rank))
        for at in range(0, len(group), step):
            some = group[at : at + step]
            numbers = wanted[some]
            chosen = np.full((len(some), seats), -1, np.int64)
            chosen[:, :width] = lists[some, :seats]
            hidden = chosen < 0
            page, offset = np.divmod(np.maximum(chosen, 0), page_tokens)
            places = rows.table[rows.owners[numbers, None], page] * page_tokens + offset
            out[numbers] = attend(q[numbers], np.take(flat, places, axis=0), hidden)


def attend(q: Array, keys: Array, hidden: Array) -> Array:
    """softmax(q keys^T) keys, `hidden` pairs left out.

    Shapes: q, result (rows, heads, rank) · keys (rows or 1, seats, rank), finite where hidden
            hidden (rows, seats), whole blocks
    """
    rows, seats = hidden.shape
    blocks = seats // BLOCK
    keys = keys.reshape(len(keys), blocks, BLOCK, -1)
    scores = np.matmul(q[:, None], keys.swapaxes(2, 3))  # (rows, blocks, heads, BLOCK)
    np.copyto(scores, -np.inf, where=hidden.reshape(rows, blocks, 1, BLOCK))
    top = np.maximum.reduce(scores, axis=3)
    scores -= np.maximum.reduce(top, axis=1)[:, None, :, None]
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=3)
    parts = np.matmul(scores, keys)
    out, mass = parts[:, 0], total[:, 0]
    for block in range(1, blocks):
        out += parts[:, block]
        mass += total[:, block]
    out /= mass[..., None]
    return out


def pool_scores(q: Array, head_weights: Array, keys: Array) -> Array:
    """As the reference's, a call being one row's heads by BLOCK pools."""
    rows, _, dim = q.shape
    pools = keys.shape[-2]
    blocks = -(-pools // BLOCK)
    padded = np.zeros((*keys.shape[:-2], blocks * BLOCK, dim), np.float32)
    padded[..., :pools, :] = keys
    padded = padded.reshape(-1, blocks, BLOCK, dim)
    scores = np.matmul((q * np.float32(dim**-0.5))[:, None], padded.swapaxes(2, 3))
    np.maximum(scores, 0.0, out=scores)
    summed = np.matmul(head_weights[:, None, None], scores)
    return summed.reshape(rows, -1)[:, :pools]

"""exact NumPy: the KDA memory token by token, in prompts as in answers."""

from __future__ import annotations

import numpy as np

from engine.device.device import Array
from engine.ops.reference.recurrent import check_kda, normalised, one_token
from engine.ops.spec import Rows, Segment


def kda(qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> Array:
    """Chunks of a prompt would have an order of their own, and with it the place of each cut."""
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
        _walk(qk, v, g, beta, state[segment.slot], segment, out)
    return out


def _walk(
    qk: Array, v: Array, g: Array, beta: Array, memory: Array, segment: Segment, out: Array
) -> None:
    """`one_token` for each token of a sequence; all that needs no memory is done for all at once.

    Shapes: as in `one_token`, over all rows of the step · memory (heads, dim, dim), one slot's
    """
    part = slice(segment.first, segment.first + segment.length)
    decay = np.exp(g[part])
    asks = (qk[part] * decay[:, None]).transpose(0, 2, 1, 3)
    keys = qk[part, 1, :, :, None]
    reads = np.empty((segment.length, *asks.shape[1:]), np.float32)
    writes = v[part].copy()
    strength = beta[part, :, None]
    change = np.empty_like(memory)
    tokens = zip(asks, reads, writes, strength, decay[..., None], keys, strict=True)
    for ask, read, write, strong, keep, key in tokens:
        np.matmul(ask, memory, out=read)
        write -= read[:, 1]
        write *= strong
        np.multiply(memory, keep, out=memory)
        np.multiply(key, write[:, None], out=change)
        np.add(memory, change, out=memory)
    into = out[part]
    np.multiply(writes, np.vecdot(qk[part, 0], qk[part, 1])[..., None], out=into)
    into += reads[:, :, 0]

"""plain NumPy: mask, top-k, top-p, min-p, draw.

The order of the filters: temperature first, then the `top_k` likeliest ids, then the smallest head
of these that holds `top_p` of their mass, then all that reach `min_p` times the likeliest. Every
value of a row is a function of that row alone, so its token never depends on neighbours (O30, D9).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ShapeMismatch

PART_BYTES = 1 << 16  # of one temporary; larger ones are mapped and faulted in anew at each call
GREEDY_BELOW = 1e-3  # temperature under which a row takes its likeliest id (O23)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_MINUS_INFINITY = np.float32(-np.inf)

Floats = npt.NDArray[Any]
Ints = npt.NDArray[Any]


def sample(
    logits: Floats,
    *,
    temperature: Floats,
    top_p: Floats,
    top_k: Ints,
    min_p: Floats,
    seeds: Ints,
    counters: Ints,
    banned: tuple[tuple[int, int], ...],
    usable: int,
) -> tuple[Ints, Floats]:
    """Draw one token a row; the contract is `Ops.sample` of `engine/ops/spec.py`.

    Shapes: logits (rows, vocab) f32, changed where ids are banned
            temperature, top_p, min_p (rows,) f32 · top_k (rows,) i32, 0 is off
            seeds (rows,) u64 · counters (rows, 2) u32: choice, position
            result: ids (rows,) i32, -1 where a row holds NaN or infinity; logprobs (rows,) f32
    Raises: ShapeMismatch when a column has another length than logits has rows.
    """
    rows, vocab = logits.shape
    lengths = [len(c) for c in (temperature, top_p, top_k, min_p, seeds, counters)]
    if lengths != [rows] * 6 or not 0 < usable <= vocab:
        raise ShapeMismatch(
            f"sample: logits {logits.shape} with columns of {lengths} rows and {usable} usable "
            f"ids; every column needs {rows} rows and usable at most {vocab}."
        )
    if not rows:
        return np.zeros(0, np.int32), np.zeros(0, np.float32)
    every = _indices(rows)
    top = logits[every, logits.argmax(axis=1)]  # both find a NaN first, so two values tell of a row
    low = logits[every, logits.argmin(axis=1)]
    bad = None
    if not all(map(math.isfinite, top.tolist() + low.tolist())):
        bad = ~(np.isfinite(top) & np.isfinite(low))
        logits[bad] = top[bad] = 0.0  # any finite row will do: its id is thrown away below
    mass = np.concatenate([_log_mass(logits[part], top[part]) for part in _parts(rows, vocab)])
    if banned:
        logits[_places(banned)] = _MINUS_INFINITY
    open_logits = logits[:, :usable]
    hot = [at for at, value in enumerate(temperature.tolist()) if value >= GREEDY_BELOW]
    ids = open_logits.argmax(axis=1)
    if hot:
        chances = uniforms(seeds, counters)
        columns = (temperature, top_p, top_k, min_p, chances)
        for part in _parts(len(hot), usable):
            at = hot[part]
            ids[at] = _draw(open_logits[at], *(column[at] for column in columns))
    logprobs = np.minimum(logits[every, ids] - mass, np.float32(0.0))
    if bad is not None:
        ids[bad] = -1
        logprobs[bad] = _MINUS_INFINITY
    return ids.astype(np.int32), logprobs


def uniforms(seeds: Ints, counters: Ints) -> Floats:
    """One number in [0, 1) a row, of 53 bits, from (seed, choice, position) and nothing else (O30).

    Shapes: seeds (rows,) u64 · counters (rows, 2) u32 · result (rows,) f64
    Source: the splitmix64 finaliser (Steele, Lea, Flood 2014) of seed, then of counter.
    """
    place = counters.astype(np.uint64)
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
    drawn = _mix(stream ^ ((place[:, 0] << np.uint64(32)) | place[:, 1]))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: Ints) -> Ints:
    """The splitmix64 finaliser, on arrays so that the products wrap."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


def _draw(
    logits: Floats,
    temperature: Floats,
    top_p: Floats,
    top_k: Ints,
    min_p: Floats,
    chances: Floats,
) -> Ints:
    """Inverse of the cumulative distribution, in order of ids, over what the filters keep.

    Shapes: logits (rows, usable) f32, -inf where banned · chances (rows,) f64 in [0, 1)
            the others as in `sample`
    """
    z = logits / temperature[:, None]
    top = np.maximum.reduce(z, axis=1, keepdims=True)
    weights = np.exp(z - top)  # 1.0 for the likeliest
    if top_k.any() or np.minimum.reduce(top_p) < 1.0:
        weights *= _head(z, top, top_p, top_k)
    if min_p.any():
        weights *= weights >= min_p[:, None]
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    # At most 1 - 2^-53, so the product stays below the whole mass also when it is rounded.
    reach = chances * mass[:, -1]
    ids: Ints = np.add.reduce(mass <= reach[:, None], axis=1, dtype=np.intp)
    return ids


def _head(z: Floats, top: Floats, top_p: Floats, top_k: Ints) -> npt.NDArray[np.bool_]:
    """Which ids top-k and top-p keep; equal logits go to the lower id. At least one stays.

    Shapes: z (rows, usable) · top (rows, 1) · result (rows, usable)
    """
    rows, usable = z.shape
    falling = -np.sort(-z, axis=1)
    most = np.where(top_k > 0, np.minimum(top_k, usable), usable)
    weights = np.exp(falling - top)
    if top_k.any():
        weights *= _indices(usable) < most[:, None]
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    # Where top_p is 1 all is kept, whatever the last bits of the sums are.
    wanted = np.where(top_p < 1.0, top_p * mass[:, -1], np.inf)
    within = mass - weights < wanted[:, None]
    kept = np.minimum(np.maximum(np.add.reduce(within, axis=1, dtype=np.intp), 1), most)
    least = falling[_indices(rows), kept - 1][:, None]
    head: npt.NDArray[np.bool_] = z >= least
    surplus = np.add.reduce(head, axis=1, dtype=np.intp) - kept
    if surplus.any():  # equal logits at the border: the last of them leave
        level = z == least
        left = level.sum(axis=1) - surplus
        head &= ~level | (np.cumsum(level, axis=1) <= left[:, None])
    return head


def _log_mass(logits: Floats, top: Floats) -> Floats:
    """Logarithm of the sum of exponentials. Shapes: logits (rows, vocab) · top, result (rows,)."""
    shifted = logits - top[:, None]
    sums: Floats = np.log(np.add.reduce(np.exp(shifted, out=shifted), axis=1)) + top
    return sums


def _parts(rows: int, width: int) -> list[slice]:
    """Rows in parts whose float64 temporaries stay small; every row stands for itself."""
    step = max(PART_BYTES // (8 * width), 1)
    return [slice(first, first + step) for first in range(0, rows, step)]


@functools.lru_cache(maxsize=256)
def _indices(count: int) -> Ints:
    """0, 1, ..., count - 1; read only, because calls share it."""
    indices = np.arange(count)
    indices.flags.writeable = False
    return indices


@functools.lru_cache(maxsize=256)
def _places(banned: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """Index arrays of (row, id) pairs; the same pairs come step after step."""
    pairs = np.asarray(banned, dtype=np.intp)
    return pairs[:, 0], pairs[:, 1]

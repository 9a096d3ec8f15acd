"""plain NumPy: mask, top-k, top-p, min-p, draw.

The order of the filters: temperature first, then the `top_k` likeliest ids, then the smallest head
of these that holds `top_p` of their mass, then all that reach `min_p` times the likeliest. Every
value of a row is a function of that row alone, so its token never depends on neighbours (O30, D9).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ShapeMismatch

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
    columns = (temperature, top_p, top_k, min_p, seeds, counters)
    if any(len(column) != rows for column in columns) or not 0 < usable <= vocab:
        raise ShapeMismatch(
            f"sample: logits {logits.shape} with columns of {[len(c) for c in columns]} rows and "
            f"{usable} usable ids; every column needs {rows} rows and usable at most {vocab}."
        )
    every = np.arange(rows)
    top = logits[every, logits.argmax(axis=1)]  # both find a NaN first, so two values tell of a row
    bad = ~(np.isfinite(top) & np.isfinite(logits[every, logits.argmin(axis=1)]))
    any_bad = bool(bad.any())
    if any_bad:
        logits[bad] = top[bad] = 0.0  # any finite row will do: its id is thrown away below
    shifted = logits - top[:, None]
    mass = np.log(np.add.reduce(np.exp(shifted, out=shifted), axis=1))
    if banned:
        logits[_places(banned)] = _MINUS_INFINITY
    open_logits = logits[:, :usable]
    ids = open_logits.argmax(axis=1)
    drawn = temperature >= GREEDY_BELOW
    if drawn.any():
        ids[drawn] = _draw(
            open_logits[drawn] / temperature[drawn, None],
            top_p=top_p[drawn],
            top_k=top_k[drawn],
            min_p=min_p[drawn],
            chance=uniforms(seeds[drawn], counters[drawn]),
        )
    logprobs = np.minimum(logits[every, ids] - top - mass, np.float32(0.0))
    if any_bad:
        ids[bad] = -1
        logprobs[bad] = _MINUS_INFINITY
    return ids.astype(np.int32), logprobs


def uniforms(seeds: Ints, counters: Ints) -> Floats:
    """One number in [0, 1) a row, of 53 bits, from (seed, choice, position) and nothing else (O30).

    Shapes: seeds (rows,) u64 · counters (rows, 2) u32 · result (rows,) f64
    Source: the splitmix64 finaliser (Steele, Lea, Flood 2014) over seed, then over the counter.
    """
    place = counters.astype(np.uint64)
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    state = _mix(state ^ ((place[:, 0] << np.uint64(32)) | place[:, 1]))
    return (_mix(state + _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: Ints) -> Ints:
    """The splitmix64 finaliser, on arrays so that the products wrap."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


def _draw(z: Floats, *, top_p: Floats, top_k: Ints, min_p: Floats, chance: Floats) -> Ints:
    """Inverse of the cumulative distribution, in order of ids, over what the filters keep.

    Shapes: z (rows, usable) f32, logits over temperature, -inf where banned · the others (rows,)
    """
    top = z.max(axis=1, keepdims=True)
    weights = np.exp(z - top)  # 1.0 for the likeliest
    if (top_k > 0).any() or (top_p < 1.0).any():
        weights *= _head(z, top, top_p=top_p, top_k=top_k)
    if (min_p > 0.0).any():
        weights *= weights >= min_p[:, None]
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    total = mass[:, -1]
    # A chance of nearly 1 can round up to the whole mass, where no id is left.
    reach = np.minimum(chance * total, np.nextafter(total, 0.0))
    ids: Ints = (mass <= reach[:, None]).sum(axis=1)
    return ids


def _head(z: Floats, top: Floats, *, top_p: Floats, top_k: Ints) -> npt.NDArray[np.bool_]:
    """Which ids top-k and top-p keep; equal logits go to the lower id. At least one stays.

    Shapes: z (rows, usable) · top (rows, 1) · result (rows, usable)
    """
    usable = z.shape[1]
    falling = np.sort(z, axis=1)[:, ::-1]
    most = np.where(top_k > 0, np.minimum(top_k, usable), usable)[:, None]
    weights = np.exp(falling - top) * (np.arange(usable) < most)
    mass = np.cumsum(weights, axis=1, dtype=np.float64)
    # Where top_p is 1 all is kept, whatever the last bits of the sums are.
    wanted = np.where(top_p < 1.0, top_p * mass[:, -1], np.inf)[:, None]
    kept = np.clip(((mass - weights) < wanted).sum(axis=1, keepdims=True), 1, most)
    least = np.take_along_axis(falling, kept - 1, axis=1)
    head: npt.NDArray[np.bool_] = z >= least
    surplus = head.sum(axis=1, keepdims=True) - kept
    if surplus.any():  # equal logits at the border: the last of them leave
        level = z == least
        head &= ~level | (np.cumsum(level, axis=1) <= level.sum(axis=1, keepdims=True) - surplus)
    return head


@functools.lru_cache(maxsize=256)
def _places(banned: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """Index arrays of (row, id) pairs; the same pairs come step after step."""
    pairs = np.asarray(banned, dtype=np.intp)
    return pairs[:, 0], pairs[:, 1]

"""exact NumPy: rows in order of their expert, in tiles of one call shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.exact.linear import TILE, Panels, multiply, panels_of
from engine.ops.reference.moe import in_pieces
from engine.ops.reference.pointwise import swiglu


@dataclass(frozen=True, slots=True)
class Experts:
    """Each expert on its own; the shared one is cut into pieces that every row chooses.

    Shapes, E experts with the pieces last: gate_up E x (ins, 2*inner) · down E x (inner, ins)
    """

    gate_up: tuple[Panels, ...]
    down: tuple[Panels, ...]
    shared: int
    ins: int
    inner: int


def pack_experts(
    gate_up: npt.NDArray[np.float32],
    down: npt.NDArray[np.float32],
    shared_gate_up: npt.NDArray[np.float32],
    shared_down: npt.NDArray[np.float32],
) -> Experts:
    all_up, all_down, pieces = in_pieces(gate_up, down, shared_gate_up, shared_down)
    return Experts(
        gate_up=tuple(panels_of(expert.T[None]) for expert in all_up),
        down=tuple(panels_of(expert[None]) for expert in all_down),
        shared=pieces,
        ins=all_up.shape[2],
        inner=all_up.shape[1] // 2,
    )


def experts(x: Array, chosen: Array, weights: Array, w: Experts, limit: float | None) -> Array:
    if chosen.shape != weights.shape or len(chosen) != len(x) or x.shape[1] != w.ins:
        raise ShapeMismatch(
            f"x {x.shape}, chosen {chosen.shape} and weights {weights.shape} do not fit."
        )
    rows, active = chosen.shape
    place, tiles = _seats(chosen, len(w.gate_up) - w.shared)
    routed, each = tiles[-1] * TILE, -(-rows // TILE)
    starts = range(routed, routed + w.shared * each * TILE, each * TILE)
    tiles += [tiles[-1] + piece * each for piece in range(1, w.shared + 1)]

    wanted = np.zeros((tiles[-1] * TILE, w.ins), np.float32)
    for rank in range(active):
        wanted[place[rank]] = x
    for start in starts:
        wanted[start : start + rows] = x
    act = swiglu(_each(wanted, tiles, w.gate_up)[:, : 2 * w.inner], limit)
    act[place] *= weights.T[:, :, None]
    answers = _each(act, tiles, w.down)[:, : w.ins]
    out: Array = answers[place[0]]
    for rank in range(1, active):  # one by one, best first, then the shared expert
        out += answers[place[rank]]
    for start in starts:
        out += answers[start : start + rows]
    return out


def _seats(chosen: Array, experts: int) -> tuple[Array, list[int]]:
    """Where the row of each choice lies among all tiles, and where each expert's tiles begin.

    Shapes: chosen (rows, active) -> (active, rows) · experts + 1 tile numbers
    """
    flat = chosen.ravel()
    counts = np.bincount(flat, minlength=experts)
    tiles = [0, *accumulate((-(-counts // TILE)).tolist())]
    order = np.argsort(flat, kind="stable")
    skipped = np.array(tiles[:-1]) * TILE - (np.cumsum(counts) - counts)
    place = np.empty(flat.size, np.int64)
    place[order] = np.arange(flat.size) + np.repeat(skipped, counts)
    return place.reshape(chosen.shape).T, tiles


def _each(x: Array, tiles: list[int], matrices: tuple[Panels, ...]) -> Array:
    """Tiles of rows, each by the matrix of its expert, whose tiles are [tiles[e], tiles[e + 1])."""
    left = x.reshape(-1, TILE, 1, x.shape[1])
    out = np.empty((*left.shape[:3], matrices[0].columns), np.float32)
    for (start, end), matrix in zip(pairwise(tiles), matrices, strict=True):
        if start < end:
            multiply(left[start:end], matrix, out[start:end])
    return out.reshape(len(x), -1)

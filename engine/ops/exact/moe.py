"""exact NumPy: rows in order of their expert, in tiles of one call shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.exact.linear import PANEL, TILE, Panels, multiply, panels_of
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
    routed = len(w.gate_up) - w.shared
    flat = chosen.ravel()
    counts = [*np.bincount(flat, minlength=routed).tolist(), *(w.shared * [rows])]
    # Where each expert's tiles begin, and in them the rows that chose it, in order.
    spans, first = [], 0
    for count in counts:
        spans.append((first, first + -(-count // TILE)))
        first = spans[-1][1]
    order = np.argsort(flat, kind="stable")
    place = np.empty(rows * active, np.int64)
    ahead = np.cumsum([0, *counts[: routed - 1]])
    begin = np.array([tile * TILE for tile, _ in spans[:routed]]) - ahead
    place[order] = np.arange(rows * active) + begin[flat[order]]

    wanted = np.zeros((first * TILE, w.ins), np.float32)
    wanted[place] = np.repeat(x, active, axis=0)
    for start, _ in spans[routed:]:
        wanted[start * TILE : start * TILE + rows] = x
    act = swiglu(_each(wanted, spans, w.gate_up)[:, : 2 * w.inner], limit)
    act[place] *= weights.reshape(-1, 1)
    answers = _each(act, spans, w.down)[:, : w.ins]
    taken = answers[place.reshape(rows, active).T]
    out: Array = taken[0]
    for part in taken[1:]:  # one by one, best first, then the shared expert
        out += part
    for start, _ in spans[routed:]:
        out += answers[start * TILE : start * TILE + rows]
    return out


def _each(x: Array, spans: list[tuple[int, int]], matrices: tuple[Panels, ...]) -> Array:
    """Tiles of rows, each by the matrix of its expert."""
    tiles = x.reshape(-1, TILE, 1, x.shape[1])
    out = np.empty((*tiles.shape[:3], matrices[0].pieces[0].shape[1] * PANEL), np.float32)
    for (start, end), matrix in zip(spans, matrices, strict=True):
        if start < end:
            multiply(tiles[start:end], matrix, out[start:end])
    return out.reshape(len(x), -1)

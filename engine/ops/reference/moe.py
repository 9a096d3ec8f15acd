"""plain NumPy: route and grouped matmul."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch
from engine.ops.reference.pointwise import FLOAT_ROWS, gated, sigmoid, swiglu

DENSE_ROWS = 24  # up to so many rows all experts in one matmul beat one matmul an expert
DENSE_EXPERTS = 16  # above, the few experts that are hit are a small share of all
FEW_EXPERTS = 32  # up to so many, a few rows are routed without NumPy


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of one width; the shared one is cut into `shared` pieces that every row chooses.

    Shapes, E experts with the pieces last: gate_up (E, ins, 2*inner) · down (E*inner, ins)
            together (ins, 2*E*inner): all gates, then all ups; None where it does not pay
    """

    gate_up: Array
    down: Array
    together: Array | None
    shared: int

    @property
    def inner(self) -> int:
        return self.gate_up.shape[2] // 2


def pack_experts(
    gate_up: npt.NDArray[np.float32],
    down: npt.NDArray[np.float32],
    shared_gate_up: npt.NDArray[np.float32],
    shared_down: npt.NDArray[np.float32],
) -> Experts:
    together = None
    every, down_in, pieces = in_pieces(gate_up, down, shared_gate_up, shared_down)
    count, inner, ins = down_in.shape
    if count - pieces <= DENSE_EXPERTS:
        halves = every.reshape(count, 2, inner, ins).transpose(3, 1, 0, 2)
        together = np.ascontiguousarray(halves.reshape(ins, -1))
    return Experts(
        gate_up=np.ascontiguousarray(every.transpose(0, 2, 1)),
        down=np.ascontiguousarray(down_in.reshape(-1, ins)),
        together=together,
        shared=pieces,
    )


def in_pieces(
    gate_up: npt.NDArray[np.float32],
    down: npt.NDArray[np.float32],
    shared_gate_up: npt.NDArray[np.float32],
    shared_down: npt.NDArray[np.float32],
) -> tuple[Array, Array, int]:
    """The shared expert cut into experts of the routed ones' width, behind them.

    Shapes: as `Ops.pack_experts` -> gate_up (E, 2*inner, ins) · down (E, inner, ins) · pieces
    Raises: ShapeMismatch
    """
    count, width, ins = gate_up.shape
    inner = width // 2
    pieces = shared_gate_up.shape[0] // width
    if shared_gate_up.shape != (pieces * width, ins) or down.shape != (count, ins, inner):
        raise ShapeMismatch(
            f"shared expert {shared_gate_up.shape} and down {down.shape} do not fit experts of "
            f"{gate_up.shape}; its width must be a multiple of {inner}."
        )
    # (2, pieces, inner, ins): a piece is some of the gate rows and the same of the up rows
    cut = shared_gate_up.reshape(2, pieces, inner, ins).transpose(1, 0, 2, 3)
    every = np.concatenate([gate_up, cut.reshape(pieces, width, ins)])
    cut_down = shared_down.reshape(ins, pieces, inner).transpose(1, 2, 0)
    return every, np.concatenate([down.transpose(0, 2, 1), cut_down]), pieces


def route(
    logits: Array,
    bias: Array,
    *,
    active: int,
    scale: float,
    normalise: bool,
    groups: int,
    top_groups: int,
) -> tuple[Array, Array]:
    rows, experts = logits.shape
    fits = bias.shape == (experts,) and experts % groups == 0
    if fits and rows <= FLOAT_ROWS and experts <= FEW_EXPERTS and top_groups == groups:
        return _route_few_rows(logits, bias.tolist(), active, scale, normalise)
    return route_rows(
        logits,
        bias,
        active=active,
        scale=scale,
        normalise=normalise,
        groups=groups,
        top_groups=top_groups,
    )


def route_rows(
    logits: Array,
    bias: Array,
    *,
    active: int,
    scale: float,
    normalise: bool,
    groups: int,
    top_groups: int,
) -> tuple[Array, Array]:
    """`route` for any number of rows, each by itself."""
    rows, experts = logits.shape
    if bias.shape != (experts,) or experts % groups:
        raise ShapeMismatch(f"bias {bias.shape} or {groups} groups do not fit {experts} experts.")
    scores = sigmoid(logits)
    biased = scores + bias
    if top_groups < groups:
        biased = _keep_groups(biased, groups, top_groups)
    every = np.arange(rows)
    ids = np.empty((rows, active), np.int32)
    for rank in range(active):  # argmax takes the lowest of equals; `active` is small
        best = biased.argmax(axis=1)
        ids[:, rank] = best
        biased[every, best] = -np.inf
    weights = scores[every[:, None], ids]
    if normalise:
        weights /= np.add.reduce(weights, axis=1, keepdims=True) + 1e-20
    weights *= scale
    return ids, weights


def _route_few_rows(
    logits: Array,
    bias: list[float],
    active: int,
    scale: float,
    normalise: bool,  # noqa: FBT001 # as the op says it
) -> tuple[Array, Array]:
    """The same in Python floats, which cost less than ten calls."""
    chosen, weights = [], []
    for row in logits.tolist():
        scores = [1.0 / (1.0 + math.exp(-max(logit, -80.0))) for logit in row]
        biased = [-(score + more) for score, more in zip(scores, bias, strict=True)]
        ids = sorted(range(len(scores)), key=biased.__getitem__)[:active]
        total = sum(scores[expert] for expert in ids) + 1e-20 if normalise else 1.0
        chosen.append(ids)
        weights.append([scores[expert] / total * scale for expert in ids])
    return np.array(chosen, np.int32), np.array(weights, np.float32)


def _keep_groups(biased: Array, groups: int, top_groups: int) -> Array:
    """Only experts of the best groups stay; a group's score is the sum of its two best experts."""
    grouped = biased.reshape(len(biased), groups, -1)
    best_two = np.sort(grouped, axis=2)[:, :, -2:]
    score = np.add.reduce(best_two, axis=2)
    order = np.argsort(-score, axis=1, kind="stable")
    kept = np.full(score.shape, -np.inf, np.float32)
    np.put_along_axis(kept, order[:, :top_groups], 0.0, axis=1)
    return (grouped + kept[:, :, None]).reshape(biased.shape)


def experts(x: Array, chosen: Array, weights: Array, w: Experts, limit: float | None) -> Array:
    if chosen.shape != weights.shape or len(chosen) != len(x) or x.shape[1] != w.gate_up.shape[1]:
        raise ShapeMismatch(
            f"x {x.shape}, chosen {chosen.shape} and weights {weights.shape} do not fit."
        )
    if len(x) <= FLOAT_ROWS:
        out = np.empty(x.shape, np.float32)
        for row, ids in enumerate(chosen.tolist()):
            _one_row(x[row], ids, weights[row], w, limit, out[row])
        return out
    if w.together is not None and len(x) <= DENSE_ROWS:
        return _all_experts(x, chosen, weights, w, w.together, limit)
    return _sorted_rows(x, chosen, weights, w, limit)


def _one_row(
    x: Array, chosen: list[int], weights: Array, w: Experts, limit: float | None, out: Array
) -> None:
    """The chosen experts one by one: nothing but their weights is read.

    Shapes: x, out (hidden,)
    """
    count, inner = len(w.gate_up), w.inner
    hit = [*chosen, *range(count - w.shared, count)]
    gate_up = np.empty((len(hit), 2 * inner), np.float32)
    for row, expert in enumerate(hit):
        np.dot(x, w.gate_up[expert], gate_up[row])
    act = swiglu(gate_up, limit)
    act[: len(chosen)] *= weights[:, None]
    np.dot(act[0], w.down[hit[0] * inner : (hit[0] + 1) * inner], out)
    for row, expert in enumerate(hit[1:], 1):
        out += np.dot(act[row], w.down[expert * inner : (expert + 1) * inner])


def _all_experts(
    x: Array, chosen: Array, weights: Array, w: Experts, together: Array, limit: float | None
) -> Array:
    """All experts in one matmul; those that a row did not choose get weight 0."""
    rows, count = len(x), len(w.gate_up)
    gate_up = np.dot(x, together)
    act = gated(gate_up[:, : count * w.inner], gate_up[:, count * w.inner :], limit)
    share = np.zeros((rows, count), np.float32)
    share[:, count - w.shared :] = 1.0
    share[np.arange(rows)[:, None], chosen] = weights
    act.reshape(rows, count, w.inner)[:] *= share[:, :, None]
    return np.dot(act, w.down)


def _sorted_rows(x: Array, chosen: Array, weights: Array, w: Experts, limit: float | None) -> Array:
    """Rows in order of their expert: one matmul for each expert that was hit."""
    rows, active = chosen.shape
    count, inner = len(w.gate_up), w.inner
    routed = count - w.shared
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    ends = np.cumsum(np.bincount(flat, minlength=routed)).tolist()
    wanted = x[order // active]

    gate_up = np.empty((len(order) + w.shared * rows, 2 * inner), np.float32)
    spans = [(e, first, end) for e, (first, end) in enumerate(zip([0, *ends], ends, strict=False))]
    spans = [span for span in spans if span[1] < span[2]]
    for expert, first, end in spans:
        np.dot(wanted[first:end], w.gate_up[expert], gate_up[first:end])
    for piece in range(w.shared):
        first = len(order) + piece * rows
        np.dot(x, w.gate_up[routed + piece], gate_up[first : first + rows])

    act = swiglu(gate_up, limit)
    act[: len(order)] *= weights.ravel()[order][:, None]
    routed_out = np.empty((len(order), x.shape[1]), np.float32)
    for expert, first, end in spans:
        down = w.down[expert * inner : (expert + 1) * inner]
        np.dot(act[first:end], down, routed_out[first:end])

    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    out = np.add.reduce(routed_out[back].reshape(rows, active, -1), axis=1)
    for piece in range(w.shared):
        first = len(order) + piece * rows
        out += np.dot(act[first : first + rows], w.down[(routed + piece) * inner :][:inner])
    return out

"""exact NumPy: matmul in tiles of one fixed call shape, so that a row never feels its neighbours.

BLAS picks its kernel, and with it the order of a row's sum, by the shape of a call. Here a call is
TILE rows by one panel of columns, short tiles filled up with zeros: the order is the same for one
row and for a thousand, wherever the row lies. On all kernel families tried, AVX2 and AVX-512, this
holds for 1, 2, 4 and 8 rows; for 16 it does not, and padding rows to 8 or 16 without panels fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.errors import ShapeMismatch

TILE = 4  # rows of a call; one row costs as much as four
PANELS = (64, 48, 32)  # columns of a call; the first that wastes little; 24 would not do
WASTE = 1.1
DEPTH = 448  # terms of a call at most; above, OpenBLAS cuts the sum by itself


@dataclass(frozen=True, slots=True)
class Panels:
    """Matrices of some heads, cut into columns and, where they are deep, into pieces of the sum.

    Shapes: pieces: each (heads, panels, its terms, columns), zeros behind the last of `outs`
            bias (outs,)
    """

    pieces: tuple[Array, ...]
    outs: int
    bias: Array | None = None

    @property
    def ins(self) -> int:
        return sum(piece.shape[2] for piece in self.pieces)

    @property
    def columns(self) -> int:
        """Of all panels together."""
        return self.pieces[0].shape[1] * self.pieces[0].shape[3]


def panels_of(weight: npt.NDArray[np.float32], bias: Array | None = None) -> Panels:
    """Shapes: weight (heads, ins, outs)."""
    heads, ins, outs = weight.shape
    padded = {panel: -(-outs // panel) * panel for panel in PANELS}
    panel = next(p for p in PANELS if padded[p] <= WASTE * min(padded.values()))
    wide = np.zeros((heads, ins, padded[panel]), np.float32)
    wide[:, :, :outs] = weight
    cut = wide.reshape(heads, ins, -1, panel).transpose(0, 2, 1, 3)
    pieces = np.array_split(cut, max(1, -(-ins // DEPTH)), axis=2)
    return Panels(tuple(np.ascontiguousarray(piece) for piece in pieces), outs, bias)


def pack(weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> Panels:
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ShapeMismatch(
            f"a dense weight is (outs, ins) and its bias (outs,), not {weight.shape}."
        )
    return panels_of(weight.T[None], bias)


def pack_heads(weight: npt.NDArray[np.float32]) -> Panels:
    if weight.ndim != 3:
        raise ShapeMismatch(f"weights of heads are (heads, ins, outs), not {weight.shape}.")
    return panels_of(weight)


def tiled(x: Array) -> Array:
    """Rows filled up to whole tiles: (rows, ...) -> (tiles, TILE, ...), a view where none is short.

    What is filled in is zero, and its results are thrown away.
    """
    rows = len(x)
    tiles = -(-rows // TILE)
    if rows != tiles * TILE:
        padded = np.zeros((tiles * TILE, *x.shape[1:]), np.float32)
        padded[:rows] = x
        x = padded
    return x.reshape(tiles, TILE, *x.shape[1:])


def multiply(tiles: Array, w: Panels, out: Array) -> None:
    """Whole tiles of rows by each head's matrix.

    Shapes: tiles (tiles, TILE, heads, ins) · out (tiles, TILE, heads, columns), written
    """
    heads, panels, _, panel = w.pieces[0].shape
    left = tiles.transpose(0, 2, 1, 3)[:, :, None]
    into = out.reshape(*out.shape[:2], heads, panels, panel).transpose(0, 2, 3, 1, 4)
    if len(w.pieces) == 1:
        np.matmul(left, w.pieces[0], out=into)
        return
    first = 0
    for number, piece in enumerate(w.pieces):
        part = left[..., first : first + piece.shape[2]]
        first += piece.shape[2]
        if number == 0:
            np.matmul(part, piece, out=into)
        else:
            into += np.matmul(part, piece)


def head_linear(x: Array, w: Panels) -> Array:
    if x.ndim != 3 or x.shape[1:] != (len(w.pieces[0]), w.ins):
        raise ShapeMismatch(
            f"x {x.shape} does not fit heads of {(len(w.pieces[0]), w.ins, w.outs)} "
            "(heads, ins, outs)."
        )
    tiles = tiled(x)
    out = np.empty((*tiles.shape[:3], w.columns), np.float32)
    multiply(tiles, w, out)
    return out.reshape(-1, *out.shape[2:])[: len(x), :, : w.outs]


def linear(x: Array, w: Panels) -> Array:
    if x.ndim != 2 or x.shape[1] != w.ins:
        raise ShapeMismatch(f"x {x.shape} does not fit a weight of {(w.ins, w.outs)} (ins, outs).")
    out = head_linear(x[:, None], w)[:, 0]
    if w.bias is not None:
        out += w.bias
    return out

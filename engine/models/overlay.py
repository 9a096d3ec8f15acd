"""Overlay: rows + spans + residency over placeholder tokens; a window is an alias; splice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device, Residency
from engine.errors import NotResident, RequestFault, ShapeMismatch
from engine.messages import Picture
from engine.ops.spec import Ops


class Span(NamedTuple):
    """A run of prompt positions that takes its rows from the overlay."""

    position: int  # first prompt position, relative to the window's start
    row: int  # first overlay row
    length: int  # positions, and rows

    @property
    def end(self) -> int:
        return self.position + self.length


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Embedding rows laid over placeholder tokens; nothing changes after construction (rule 6).

    Make one with `Overlay.of`, which holds it to the laws; windows are made from one that passed.

    Shapes: rows (R, hidden), contiguous, in the trunk's embedding dtype
    """

    rows: Array
    spans: tuple[Span, ...]
    residency: Residency

    @classmethod
    def of(
        cls,
        rows: Array,
        spans: Iterable[tuple[int, int, int]],
        device: Device,
        hidden: int,
        dtype: npt.DTypeLike = np.float32,
    ) -> Overlay:
        """An overlay that obeys the shape law, the span law and the residency law (rules 1 to 3).

        Where the rows live is asked of the driver; what the caller believes is only compared.

        Raises:
            ShapeMismatch: rows are not (R >= 1, hidden), of `dtype` and contiguous.
            RequestFault: spans overlap, are empty or unsorted, or do not use each row.
            NotResident: the rows live elsewhere than in `device`'s context.
        """
        if rows.ndim != 2 or rows.shape[1] != hidden or rows.shape[0] == 0:
            raise ShapeMismatch(
                f"overlay rows have shape {tuple(rows.shape)}; the trunk takes (rows, {hidden})."
            )
        if rows.dtype != np.dtype(dtype):
            raise ShapeMismatch(
                f"overlay rows are {rows.dtype}; the trunk takes {np.dtype(dtype)}."
            )
        if not rows.flags.c_contiguous:
            raise ShapeMismatch("overlay rows are a strided view; lay them out row after row.")
        obeyed = _obey_span_law(tuple(Span(*span) for span in spans), rows.shape[0])
        home = device.locate(rows)
        if home is None or home != device.residency:
            raise NotResident(
                f"overlay rows live in {home}, but {device.name} reads {device.residency}; "
                "make them in that device's own context, or publish them to it."
            )
        return cls(rows, obeyed, home)

    def window(self, start: int, count: int) -> Overlay | None:
        """The part that falls into positions [start, start + count), rebased; None when empty.

        An alias (rule 9): the same rows, no allocation, no copy, no device call.
        """
        if start < 0 or count < 0:
            raise RequestFault(f"window({start}, {count}): start and count are 0 or more.")
        end = start + count
        inside = []
        for span in self.spans:
            low, high = max(span.position, start), min(span.end, end)
            if low < high:
                inside.append(Span(low - start, span.row + low - span.position, high - low))
        return Overlay(self.rows, tuple(inside), self.residency) if inside else None


class OverlayBuilder(Protocol):
    """Makes image rows; the vision encoder is one."""

    def build(self, pictures: Sequence[Picture]) -> Overlay:
        """Run the tower once over a request's pictures. Raises `RequestFault` or `DeviceError`."""


def splice(x: Array, overlay: Overlay, device: Device, ops: Ops) -> None:
    """Copy overlay rows over the placeholder rows of one call, in place (rules 25 to 27).

    Shapes: x (rows of the call, hidden), straight from the embedding table
    Raises: NotResident, ShapeMismatch; x is then untouched and nothing was launched
    """
    require_resident(overlay, device)
    hidden = overlay.rows.shape[1]
    if x.ndim != 2 or x.shape[1] != hidden:
        raise ShapeMismatch(
            f"splice into shape {tuple(x.shape)}, but overlay rows are {hidden} wide."
        )
    if overlay.spans[-1].end > x.shape[0]:
        raise ShapeMismatch(
            f"the window ends at row {overlay.spans[-1].end}, the call has {x.shape[0]} rows; "
            "take the window of exactly this call."
        )
    ops.lay_rows(x, overlay.rows, overlay.spans)


def require_resident(overlay: Overlay, device: Device) -> None:
    """The one residency check (rules 4 and 5): equal contexts, whatever objects stand for them."""
    if overlay.residency != device.residency:
        raise NotResident(
            f"overlay rows live in {overlay.residency}, but {device.name} reads "
            f"{device.residency}; publish them to the intake device first."
        )


def _obey_span_law(spans: tuple[Span, ...], rows: int) -> tuple[Span, ...]:
    """Rule 2. Spans may share rows (the same picture twice), but leave none unused."""
    behind = 0
    for span in spans:
        if span.length < 1 or span.position < behind:
            raise RequestFault(
                f"{span} is empty, negative, unsorted or overlaps a span that ends at {behind}."
            )
        if span.row < 0 or span.row + span.length > rows:
            raise RequestFault(f"{span} leaves the overlay's {rows} rows.")
        behind = span.end
    used = 0
    for first, end in sorted((span.row, span.row + span.length) for span in spans):
        if first > used:
            break
        used = max(used, end)
    if used < rows:
        raise RequestFault(f"overlay row {used} of {rows} is used by no span.")
    return spans

"""Tower rows -> Overlay, on the intake device, once per session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.device.device import Array, Device
from engine.errors import RequestFault, ShapeMismatch
from engine.messages import Picture
from engine.models.overlay import Overlay, Span
from engine.ops.spec import Ops


def lay_out(
    seen: Mapping[str, Array], pictures: Sequence[Picture], intake: Device, hidden: int, ops: Ops
) -> Overlay:
    """One overlay for a request's pictures; equal pictures share their rows (rule 2).

    The rows of a single picture are used as the tower left them: tower and intake share their
    residency, so there is nothing to publish (rule 13). `Overlay.of` refuses rows that live
    elsewhere.

    Shapes: seen, by digest, (tokens, hidden) each
    Raises: RequestFault when a row is not finite (rule 23), or rows and placeholders differ
    """
    first: dict[str, int] = {}
    total = 0
    for digest, rows in seen.items():
        first[digest], total = total, total + len(rows)
    for number, picture in enumerate(pictures):
        if len(seen[picture.digest]) != picture.tokens:
            raise ShapeMismatch(
                f"picture {number} has {picture.tokens} placeholders, but the tower made "
                f"{len(seen[picture.digest])} rows for it."
            )
    spans = [Span(p.position, first[p.digest], p.tokens) for p in pictures]
    rows = next(iter(seen.values())) if len(seen) == 1 else _joined(seen, first, intake, ops)
    if not ops.is_finite(rows):
        raise RequestFault("the image rows were not finite; the request was not run.")
    return Overlay.of(rows, spans, intake, hidden)


def _joined(seen: Mapping[str, Array], first: Mapping[str, int], intake: Device, ops: Ops) -> Array:
    total = sum(len(rows) for rows in seen.values())
    whole = intake.empty((total, next(iter(seen.values())).shape[1]), np.float32)
    for digest, rows in seen.items():
        ops.lay_rows(whole, rows, ((first[digest], 0, len(rows)),))
    return whole

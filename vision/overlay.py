"""Tower rows -> Overlay, on the intake device, once per session."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

from engine.config import PublishMode
from engine.device.device import Array, Device, Residency
from engine.errors import RequestFault, ShapeMismatch
from engine.messages import Picture
from engine.models.overlay import Overlay, Span, require_resident
from engine.ops.spec import Ops
from engine.pipeline.transport import Link, Route

log = logging.getLogger(__name__)


class Delivery(Enum):
    """What happens to a tower's rows before stage 0 lays them over placeholders."""

    AS_IS = "stage 0 can read them where they are"
    PUBLISH = "they are copied to the device of stage 0"
    DISABLED = "they cannot get there: this server takes no pictures"


def resolve(mode: PublishMode, tower: Residency | None, intake: Residency | None) -> Delivery:
    """What `--overlay-publish` means for a placement; asked once, at boot (rules 12 to 16).

    Args:
        mode: of the setting.
        tower: where rows are made; None when nobody knows, which fails closed.
        intake: where tokens are looked up; None as well.
    """
    if tower is None or intake is None:
        return Delivery.DISABLED
    if mode == "force":
        return Delivery.PUBLISH
    if tower == intake:
        return Delivery.AS_IS
    return Delivery.PUBLISH if mode == "auto" else Delivery.DISABLED


class Publisher:
    """Copies a request's rows from the tower's device to that of stage 0, once per session.

    Args:
        link: from tower to intake.
        mode: why it is done, for the receipt.
        counters: where publications are counted by route; shared with who tells them.
    """

    def __init__(self, link: Link, mode: PublishMode, counters: dict[str, float]) -> None:
        self._link = link
        self._mode = mode
        self._counters = counters
        counters |= {f"overlay_publications_{route}_total": 0.0 for route in Route}

    def publish(self, overlay: Overlay) -> Overlay:
        """The same rows and spans, bit for bit (rule 17), where stage 0 can read them.

        A failure leaves no trace (rule 22): both buffers go with their last reference.

        Raises: NotResident for rows that the tower's device does not have; OutOfMemory.
        """
        link, rows = self._link, overlay.rows
        require_resident(overlay, link.source)
        copy = link.target.empty(rows.shape, rows.dtype)
        link.transport(rows.size).copy(rows, copy)
        published = Overlay.of(copy, overlay.spans, link.target, rows.shape[1], rows.dtype)
        self._counters[f"overlay_publications_{link.route}_total"] += 1
        log.info(
            "image rows published from %s to %s: %d rows, %d bytes, mode %s, route %s",
            link.source.name,
            link.target.name,
            len(rows),
            rows.nbytes,
            self._mode,
            link.route,
        )
        return published


def lay_out(
    seen: Mapping[str, Array], pictures: Sequence[Picture], tower: Device, hidden: int, ops: Ops
) -> Overlay:
    """One overlay for a request's pictures; equal pictures share their rows (rule 2).

    The rows of a single picture are used as the tower left them. `Overlay.of` refuses rows that
    live elsewhere than in the tower's context.

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
    rows = next(iter(seen.values())) if len(seen) == 1 else _joined(seen, first, tower, ops)
    if not ops.is_finite(rows):
        raise RequestFault("the image rows were not finite; the request was not run.")
    return Overlay.of(rows, spans, tower, hidden)


def _joined(seen: Mapping[str, Array], first: Mapping[str, int], tower: Device, ops: Ops) -> Array:
    total = sum(len(rows) for rows in seen.values())
    whole = tower.empty((total, next(iter(seen.values())).shape[1]), np.float32)
    for digest, rows in seen.items():
        ops.lay_rows(whole, rows, ((first[digest], 0, len(rows)),))
    return whole

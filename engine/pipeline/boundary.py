"""The hand-over between two stages: two slots, exact payloads, residency checked on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.device.device import Array
from engine.errors import NotResident, RequestFault, ShapeMismatch
from engine.models.streams import payload, payload_width, row_shape
from engine.pipeline.transport import Link, Transport
from engine.spec import ModelSpec

SLOTS = 2  # used in turn (rule 64)


@dataclass(slots=True)
class _Slot:
    rows: Array  # of the reader
    transport: Transport
    unread: bool = False


class Boundary:
    """What stage b sends and stage b + 1 reads.

    Slots are there from the boot on, for the largest step (rules 65, 66, 69). A slot is written
    only after its last reader has said that it is done.

    Args:
        link: how rows get across.
        spec: the model; its residual is what crosses.
        rows: of the largest step.
    """

    def __init__(self, link: Link, spec: ModelSpec, *, rows: int) -> None:
        self.link = link
        self.copies = 0
        self.rows = 0  # sent so far
        self.collisions = 0
        self._spec = spec
        self._shape = row_shape(spec)
        self._most = rows
        self._slots = [
            _Slot(
                link.target.zeros((rows, *self._shape), np.float32),
                link.transport(rows * payload_width(spec)),
            )
            for _ in range(SLOTS)
        ]
        self._turn = 0
        link.target.synchronize()  # the zeros are there before the first rows (rule 65)

    def send(self, x: Array) -> Array:
        """The rows where the next stage reads them; its own until `done`.

        Shapes: x, result (rows, hidden), or with its residual streams
        Raises: ShapeMismatch, NotResident, RequestFault for a slot that is still being read; then
            nothing was copied and nothing counted
        """
        count = len(x)
        if x.shape[1:] != self._shape or x.dtype != np.float32 or not 0 < count <= self._most:
            raise ShapeMismatch(
                f"{x.shape} {x.dtype} is no payload of this boundary; it carries 1 to "
                f"{self._most} rows of {self._shape} float32."
            )
        source = self.link.source
        if (home := source.locate(x)) != source.residency:
            raise NotResident(
                f"rows to send live in {home}, but {source.name} has {source.residency}; "
                "only rows of the sending stage cross (R105)."
            )
        slot = self._slots[self._turn]
        if slot.unread:
            self.collisions += 1
            raise RequestFault(f"slot {self._turn} to {self.link.target.name} is still being read.")
        into = slot.rows[:count]
        slot.transport.copy(payload(x, self._spec), payload(into, self._spec))
        slot.unread = True
        self._turn = (self._turn + 1) % SLOTS
        self.copies += 1
        self.rows += count
        return into

    def done(self) -> None:
        """The reader needs nothing any more of what was sent."""
        for slot in self._slots:
            slot.unread = False

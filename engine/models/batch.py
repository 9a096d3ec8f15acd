"""All that a forward pass may read, as arrays: ids, row geometry, page table, slots, image rows."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.device import Array
from engine.models.overlay import Overlay
from engine.ops.spec import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arrays only, nothing about requests; stage 0 makes it from a `StepPlan`.

    Shapes: ids (rows,) i32 · outputs (outs,) i32, the rows whose logits are wanted
    """

    ids: Array
    rows: Rows
    outputs: Array
    overlays: tuple[tuple[int, Overlay], ...]  # (first batch row of the call, its window)

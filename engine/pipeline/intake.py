"""StepPlan -> Batch: row geometry, page table, the tokens that slots drew last, image windows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cache.budget import CachePlan
from engine.errors import CapacityExceeded, ShapeMismatch
from engine.messages import RequestId
from engine.models.batch import Batch
from engine.models.overlay import Overlay
from engine.ops.spec import Rows
from engine.scheduler.plan import StepPlan

Ints = npt.NDArray[Any]


class Intake:
    """Keeps the page table and each slot's last token, so that a step only sends what is new.

    Shapes: table (slots, pages of a full sequence) i32 · last tokens (slots,) i32
    """

    def __init__(self, caches: CachePlan) -> None:
        self._page_tokens = caches.page_tokens
        self._capacity = caches.context
        self._table = np.zeros((caches.slots, caches.pages_per_sequence), np.int32)
        self._held: list[tuple[int, ...]] = [()] * caches.slots  # pages that the table shows
        self._last = np.zeros(caches.slots, np.int32)

    def batch(self, plan: StepPlan, overlays: Mapping[RequestId, Overlay]) -> Batch:
        """The arrays of one step.

        Raises: CapacityExceeded when a sequence would end behind its capacity: the step is refused
            as a whole, before any layer of any stage (R28). ShapeMismatch when it has too few or
            too many pages. Nothing was changed on any device.
        """
        work = plan.work
        for w in work:
            if w.start + w.count > self._capacity:
                raise CapacityExceeded(
                    f"request {w.request}: rows up to {w.start + w.count} were planned, a sequence "
                    f"has {self._capacity} at most; serve with a larger --max-context."
                )
        slots = [w.slot for w in work]
        widest = 1
        for w in work:
            pages = w.pages
            if self._held[w.slot] is not pages:
                self._show(w.slot, pages, w.start + w.count)
            widest = max(widest, len(pages))
        rows = Rows(
            starts=_starts(tuple(w.count for w in work)),
            context=np.array([w.start for w in work], np.int32),
            slots=(places := np.array(slots, np.int32)),
            table=self._table[places, :widest],
            fresh=np.array([w.fresh for w in work], np.bool_),
            decode=next((i for i, w in enumerate(work) if w.count != 1), len(work)),
            page_tokens=self._page_tokens,
        )
        return Batch(
            ids=self._ids(plan, places),
            rows=rows,
            outputs=rows.starts[1:][[w.draw is not None for w in work]] - 1,
            overlays=_windows(plan, rows.starts, overlays) if overlays else (),
        )

    def note(self, slots: Ints, tokens: Ints) -> None:
        """Keep the tokens that these slots drew.

        A row without a token (-1) leaves 0: its request ends with the step's result, and a step
        that is on its way by then still looks up some row.
        """
        self._last[slots] = np.maximum(tokens, 0)

    def _ids(self, plan: StepPlan, slots: Ints) -> Ints:
        """Token ids of the rows: from the plan, or the slot's own last token."""
        last = self._last[slots]
        chunks = [w.tokens for w in plan.work]
        if not any(chunks):
            return last
        ids: list[int] = []
        for at, chunk in enumerate(chunks):
            ids.extend((int(last[at]),) if chunk is None else chunk)
        return np.array(ids, np.int32)

    def _show(self, slot: int, pages: tuple[int, ...], rows: int) -> None:
        row = self._table[slot]
        if not rows <= len(pages) * self._page_tokens or len(pages) > len(row):
            raise ShapeMismatch(
                f"slot {slot} has {len(pages)} pages of {self._page_tokens} tokens for {rows} rows "
                f"and a table of {len(row)}."
            )
        held = self._held[slot]
        known = len(held) if pages[: len(held)] == held else 0
        row[known : len(pages)] = pages[known:]
        row[len(pages) :] = 0
        self._held[slot] = pages


@lru_cache(maxsize=256)
def _starts(counts: tuple[int, ...]) -> Ints:
    """First row of each sequence, and the end; read only, because steps share it."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    starts.flags.writeable = False
    return starts


def _windows(
    plan: StepPlan, starts: Ints, overlays: Mapping[RequestId, Overlay]
) -> tuple[tuple[int, Overlay], ...]:
    """Of each request's overlay the part that falls into its rows, by first batch row."""
    found = []
    for at, w in enumerate(plan.work):
        overlay = overlays.get(w.request)
        window = overlay.window(w.start, w.count) if overlay is not None else None
        if window is not None:
            found.append((int(starts[at]), window))
    return tuple(found)

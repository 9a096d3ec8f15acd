"""what the layers of a stage remember about their sequences: a state each, in slots and pages."""

from __future__ import annotations

from engine.cache.indexer import IndexCursor, IndexPages, check_geometry
from engine.cache.paged import PagedRows
from engine.cache.recurrent import RecurrentSlots
from engine.device.device import Device
from engine.errors import ServerError, StateReleased
from engine.ops.spec import Rows
from engine.spec import Kda, Latent, LayerSpec, ModelSpec


class KdaState(RecurrentSlots):
    """A recurrent layer's state. A fresh sequence reads its slot as zero (`Rows.fresh`, R64)."""

    def begin(self, slot: int) -> None:
        """A new sequence in a slot: nothing to do before its first step says `fresh`."""

    def resume(self, slot: int, rows: int, snapshot: int) -> None:  # noqa: ARG002 - as LatentState's
        """A sequence whose first `rows` rows were computed before: its state stands behind them."""
        self.load(slot, snapshot)

    def keep(self, slot: int, snapshot: int) -> None:
        """Keep the state of the sequence in a slot."""
        self.save(slot, snapshot)

    def release(self, slot: int) -> None:
        """The sequence ended; its slot may go to another."""


class LatentState:
    """A latent layer's state: latent rows and index rows in pages, and a cursor each sequence."""

    def __init__(
        self,
        device: Device,
        spec: Latent,
        *,
        layer: int,
        slots: int,
        pages: int,
        page_tokens: int,
        capacity: int,
    ) -> None:
        check_geometry(spec, page_tokens)
        self.latents = PagedRows(device, pages=pages, page_tokens=page_tokens, width=spec.rank)
        try:
            self.index = IndexPages(device, spec.indexer, pages=pages, page_tokens=page_tokens)
        except ServerError:
            self.latents.free()
            raise
        self._indexer = spec.indexer
        self._layer = layer
        self._capacity = capacity
        self._cursors: list[IndexCursor | None] = [None] * slots

    def begin(self, slot: int) -> None:
        """A new sequence in a slot: a cursor at row 0."""
        label = f"slot {slot}, layer {self._layer}"
        self._cursors[slot] = IndexCursor(label, self._capacity, self._indexer)

    def resume(self, slot: int, rows: int, snapshot: int) -> None:  # noqa: ARG002 - as KdaState's
        """A sequence whose first `rows` rows stand in pages that it shares."""
        self.begin(slot)
        self.cursor(slot).reuse(rows)

    def keep(self, slot: int, snapshot: int) -> None:
        """Nothing to keep: what was written stands in pages."""

    def release(self, slot: int) -> None:
        """The sequence ended: its cursor refuses every later call (R59)."""
        cursor = self._cursors[slot]
        if cursor is not None:
            cursor.release()

    def cursor(self, slot: int) -> IndexCursor:
        """The cursor of the sequence in a slot. Raises `StateReleased` when none ever began."""
        cursor = self._cursors[slot]
        if cursor is None:
            raise StateReleased(f"slot {slot}, layer {self._layer}: no sequence began here.")
        return cursor

    def begin_step(self, rows: Rows) -> list[IndexCursor]:
        """Lockstep and room of every sequence, before anything is written (R26, R27).

        Raises: RowsMissing, CapacityExceeded, StateReleased; then no cursor has moved.
        """
        cursors = [self.cursor(segment.slot) for segment in rows.segments]
        for cursor, segment in zip(cursors, rows.segments, strict=True):
            cursor.check_step(segment.context, segment.length)
        for cursor, segment in zip(cursors, rows.segments, strict=True):
            cursor.rewind_to(segment.context)
        return cursors

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        self.latents.free()
        self.index.free()


LayerState = KdaState | LatentState


def make_state(
    layer: LayerSpec,
    number: int,
    device: Device,
    *,
    slots: int,
    pages: int,
    page_tokens: int,
    capacity: int,
    snapshots: int = 0,
) -> LayerState:
    """The state of one layer, allocated whole."""
    match layer.mixer:
        case Kda() as kda:
            return KdaState(device, kda, slots=slots, snapshots=snapshots)
        case Latent() as latent:
            return LatentState(
                device,
                latent,
                layer=number,
                slots=slots,
                pages=pages,
                page_tokens=page_tokens,
                capacity=capacity,
            )


def make_states(
    spec: ModelSpec,
    layers: range,
    device: Device,
    *,
    slots: int,
    pages: int,
    page_tokens: int,
    capacity: int,
    snapshots: int = 0,
) -> tuple[LayerState, ...]:
    """States of a stage's layers, all or none (R4).

    Args:
        spec: the model.
        layers: which of its layers.
        device: where they live.
        slots: sequences at once.
        pages: pages of each latent layer, ids [0, pages).
        page_tokens: tokens a page.
        capacity: rows of one sequence at most, C of `cache.budget.capacity` (R1).
        snapshots: places for kept recurrent state, ids [0, snapshots).
    """
    states: list[LayerState] = []
    try:
        for number in layers:
            states.append(  # noqa: PERF401 # a comprehension would lose what was made
                make_state(
                    spec.layers[number],
                    number,
                    device,
                    slots=slots,
                    pages=pages,
                    page_tokens=page_tokens,
                    capacity=capacity,
                    snapshots=snapshots,
                )
            )
    except ServerError:
        for state in states:
            state.free()
        raise
    return tuple(states)

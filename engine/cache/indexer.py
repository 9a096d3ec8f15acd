"""DSA index rows of one sequence: keys, gates, validity, and the cursor."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from engine.cache.budget import FLOAT_BYTES
from engine.cache.paged import allocate_all, free_all
from engine.device.device import Array, Device
from engine.errors import (
    CapacityExceeded,
    ConfigRefused,
    ForwardRewind,
    RequestFault,
    RowsMissing,
    StateReleased,
)
from engine.spec import Indexer, Latent

MAX_POOL = 8  # slots that a compress kernel unrolls
MAX_SELECTED_POOLS = 1024  # width of the selector's running best list


def check_geometry(latent: Latent, page_tokens: int | None = None) -> None:
    """Refuse what would give wrong answers instead of errors (R7).

    Raises:
        ConfigRefused: naming the field of the checkpoint's config.
    """
    index = latent.indexer
    positive = {
        "index_kpool": index.pool,
        "index_topk": index.top_tokens,
        "index_head_dim": index.dim,
        "index_n_heads": index.heads,
        "kv_lora_rank": latent.rank,
    }
    for field, value in positive.items():
        if value < 1:
            raise ConfigRefused(f"{field} is {value}; it must be 1 or more.")
    if index.pool > MAX_POOL:
        raise ConfigRefused(f"index_kpool is {index.pool}; pools have {MAX_POOL} tokens at most.")
    if index.top_tokens % index.pool:
        raise ConfigRefused(
            f"index_topk is {index.top_tokens}, no multiple of index_kpool {index.pool}."
        )
    if index.top_tokens // index.pool > MAX_SELECTED_POOLS:
        raise ConfigRefused(
            f"index_topk {index.top_tokens} is {index.top_tokens // index.pool} pools; "
            f"the selector keeps {MAX_SELECTED_POOLS} at most."
        )
    if page_tokens is not None and page_tokens % index.pool:
        raise ConfigRefused(
            f"index_kpool is {index.pool}, but pages of {page_tokens} tokens must hold whole pools."
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a selection over the rows of one cache looks like (R15). Units: pools, tokens."""

    pools: int  # with a partial one
    complete: int
    selected: int
    width: int  # positions of an output row, with the always-on tail


class IndexCursor:
    """How many rows of one indexer cache one sequence has written: rows [0, n) are reachable.

    Host only: no call touches a device. A refused call changes nothing.

    Args:
        label: who it belongs to, for messages, e.g. `slot 3, layer 7`.
        capacity: rows the sequence may have at most, whole pools.
        indexer: its pool and selection sizes.
    """

    def __init__(self, label: str, capacity: int, indexer: Indexer) -> None:
        self._label = label
        self._capacity = capacity
        self._indexer = indexer
        self._rows = 0
        self._pooled = 0
        self._released = False

    def __len__(self) -> int:
        self._alive()
        return self._rows

    def is_empty(self) -> bool:
        """Whether no row is written (R9)."""
        return len(self) == 0

    def capacity(self) -> int:
        """Rows at most (R9)."""
        self._alive()
        return self._capacity

    @property
    def pooled(self) -> int:
        """Pools whose keys are kept and right: the watermark w of R25."""
        self._alive()
        return self._pooled

    def ensure_room(self, rows: int) -> None:
        """Ask whether so many more rows fit (R10). Raises `CapacityExceeded`, `ValueError`."""
        self._alive()
        if rows < 0:
            raise ValueError(f"{self._label}: room for {rows} rows was asked for.")
        self.ensure_room_through(self._rows + rows)

    def ensure_room_through(self, end: int) -> None:
        """Ask whether rows up to an absolute end fit (R11). Raises `CapacityExceeded`."""
        self._alive()
        if end > self._capacity:
            raise CapacityExceeded(
                f"{self._label}: rows up to {end} were asked for, its index holds "
                f"{self._capacity}; serve with a larger --max-context."
            )

    def advance(self, rows: int) -> None:
        """Count rows that were written (R12): never clamped, never wrapped."""
        self.ensure_room(rows)
        self._rows += rows

    def rewind_to(self, rows: int) -> None:
        """Forget rows from `rows` on; their bytes stay (R13). Raises `ForwardRewind`."""
        self._alive()
        if rows < 0:
            raise ValueError(f"{self._label}: a rewind to {rows} was asked for.")
        if rows > self._rows:
            raise ForwardRewind(
                f"{self._label}: a rewind to row {rows}, but only {self._rows} were written."
            )
        self._rows = rows
        self._pooled = min(self._pooled, rows // self._indexer.pool)

    def check_step(self, committed: int, rows: int) -> None:
        """Lockstep, then room, for a step of `rows` behind `committed` (R27); moves nothing.

        Raises: RowsMissing when it stands behind the sequence; CapacityExceeded.
        """
        self._alive()
        if committed < 0 or rows < 0:
            raise ValueError(f"{self._label}: a step of {rows} rows from {committed}.")
        if self._rows < committed:
            raise RowsMissing(
                f"{self._label}: the sequence has {committed} rows, its index only {self._rows}; "
                "the request has to start anew."
            )
        self.ensure_room_through(committed + rows)

    def begin_step(self, committed: int, rows: int) -> None:
        """`check_step`, then drop rows of rejected drafts: the start of an eager step (R27)."""
        self.check_step(committed, rows)
        self.rewind_to(committed)

    def sync_to(self, committed: int, rows: int) -> None:
        """Stand where an eager step of `rows` from `committed` leaves it (R14): a reconcile.

        Behind a replayed step, which wrote and pooled the rows by itself.
        """
        self.begin_step(committed, rows)
        self._rows = committed + rows
        self.mark_pooled()

    def mark_pooled(self) -> None:
        """The keys of all complete pools are in place (R25)."""
        self._alive()
        self._pooled = self._rows // self._indexer.pool

    def geometry(self, query_rows: int) -> Geometry:
        """A selection over the rows written so far (R15). Raises `ValueError` without any."""
        if len(self) == 0 or query_rows < 1:
            raise ValueError(f"{self._label}: {query_rows} queries over {self._rows} rows.")
        pool, top = self._indexer.pool, self._indexer.top_tokens
        complete = self._rows // pool
        return Geometry(
            pools=-(-self._rows // pool),
            complete=complete,
            selected=min(top // pool, complete),
            width=top + pool - 1,
        )

    def restored(self, rows: int) -> None:
        """Stand behind rows that were copied in; no pool key is kept yet."""
        self.ensure_room_through(rows)
        self._rows = rows
        self._pooled = 0

    def reuse(self, rows: int) -> None:
        """Stand behind rows that shared pages hold, with the keys of their pools (R25)."""
        self.restored(rows)
        self.mark_pooled()

    def release(self) -> None:
        """The end of the sequence: from now on every other call is refused; twice is fine (R59)."""
        self._released = True
        self._rows = 0
        self._pooled = 0

    def _alive(self) -> None:
        if self._released:
            raise StateReleased(f"{self._label}: its index was given back.")


_HEADER = struct.Struct("<4sIQ")  # mark, key width, rows
_MARK = b"DSA1"


class IndexPages:
    """The index rows of one layer, in pages, and how they are copied out and back.

    Shapes: keys, gates (pages, page_tokens, dim) f32 · valid (pages, page_tokens) u8
            pooled (pages, page_tokens / pool, dim) f32; all undefined until written (R5)
    """

    def __init__(self, device: Device, indexer: Indexer, *, pages: int, page_tokens: int) -> None:
        rows = (pages, page_tokens, indexer.dim)
        self.keys, self.gates, self.valid, self.pooled = allocate_all(
            device,
            [
                (rows, np.float32),
                (rows, np.float32),
                (rows[:2], np.uint8),
                ((pages, page_tokens // indexer.pool, indexer.dim), np.float32),
            ],
        )
        self._device = device
        self._dim = indexer.dim
        self._page_tokens = page_tokens

    def row_address(self, row: int, capacity: int) -> tuple[int, int]:
        """Byte offset of a row in a sequence's keys (or gates) and in its validity (R6)."""
        if not 0 <= row < capacity:
            raise IndexError(f"row {row} of an index of {capacity} rows.")
        return row * self._dim * FLOAT_BYTES, row

    def snapshot(self, cursor: IndexCursor, table: Array) -> bytes:
        """Header and the rows written so far, to be kept with a prefix (R16).

        Shapes: table: page ids of the sequence, in order
        """
        rows = len(cursor)
        ids = table[: -(-rows // self._page_tokens)]
        parts = [
            self._device.download(array[ids]).reshape(-1, *array.shape[2:])[:rows].tobytes()
            for array in (self.keys, self.gates, self.valid)
        ]
        return b"".join([_HEADER.pack(_MARK, self._dim, rows), *parts])

    def restore(self, cursor: IndexCursor, table: Array, blob: bytes) -> None:
        """Copy a snapshot into the pages of a table; the cursor moves last (R16).

        Raises:
            RequestFault: the blob is cut, of another width, or of another size than it says.
            CapacityExceeded: it holds more rows than the cursor may have. Nothing was copied.
        """
        width = FLOAT_BYTES * self._dim
        mark, dim, rows = _HEADER.unpack_from(blob.ljust(_HEADER.size, b"\0"))
        want = _HEADER.size + rows * (2 * width + 1)
        if mark != _MARK or dim != self._dim or len(blob) != want:
            raise RequestFault(
                f"an index snapshot of {len(blob)} bytes, width {dim} and {rows} rows does not "
                f"fit width {self._dim}; compute the prompt again."
            )
        cursor.ensure_room_through(rows)
        at = _HEADER.size
        position = np.arange(rows)
        page, offset = np.divmod(position, self._page_tokens)
        places = np.asarray(table)[page], offset
        for array, size in ((self.keys, width), (self.gates, width), (self.valid, 1)):
            values = np.frombuffer(blob, array.dtype, rows * size // array.itemsize, at)
            staged = self._device.upload(values.reshape(rows, *array.shape[2:]))
            self._device.launch("restore index rows", array.__setitem__, places, staged)
            self._device.free(staged)
            at += rows * size
        cursor.restored(rows)

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        free_all(self._device, (self.keys, self.gates, self.valid, self.pooled))

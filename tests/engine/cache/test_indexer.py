"""The index cache and its cursor keep R1 and R5 to R25, as far as one host stage goes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from engine.cache.budget import capacity
from engine.cache.indexer import Geometry, IndexCursor, IndexPages, check_geometry
from engine.device.device import Array
from engine.errors import (
    CapacityExceeded,
    ConfigRefused,
    ForwardRewind,
    RequestFault,
    RowsMissing,
    StateReleased,
)
from engine.ops.reference.ops import ReferenceOps
from engine.spec import Indexer, Latent
from tests.fakes.decoder import a_device, rows_of

INDEXER = Indexer(heads=2, dim=8, top_tokens=16, pool=4)
LATENT = Latent(heads=2, key_dim=4, value_dim=4, query_rank=6, rank=8, indexer=INDEXER)
PAGE = 16


def a_cursor(rows: int = 0, *, capacity: int = 100, indexer: Indexer = INDEXER) -> IndexCursor:
    cursor = IndexCursor("slot 3, layer 7", capacity, indexer)
    cursor.advance(rows)
    cursor.mark_pooled()
    return cursor


def standing(cursor: IndexCursor) -> tuple[int, int]:
    return len(cursor), cursor.pooled


@pytest.mark.parametrize(
    ("context", "pool", "rows"),
    [(16_386, 4, 16_384), (4_099, 4, 4_096), (1_001, 8, 1_000), (131_072, 4, 131_072), (3, 4, 0)],
)
def test_capacity_is_whole_pools(context: int, pool: int, rows: int) -> None:
    """R1."""
    assert capacity(context, pool) == rows
    assert capacity(context, 0) == context


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("index_kpool", {"pool": 0}),
        ("index_kpool", {"pool": 9, "top_tokens": 18}),
        ("index_topk", {"top_tokens": 0}),
        ("index_topk", {"top_tokens": 18}),
        ("index_topk", {"top_tokens": 8192}),
        ("index_head_dim", {"dim": 0}),
        ("index_n_heads", {"heads": 0}),
    ],
)
def test_a_geometry_that_cannot_work_is_refused_by_field(
    field: str, change: dict[str, int]
) -> None:
    """R7."""
    check_geometry(LATENT, PAGE)
    broken = dataclasses.replace(LATENT, indexer=dataclasses.replace(INDEXER, **change))
    with pytest.raises(ConfigRefused, match=field):
        check_geometry(broken)


def test_a_pool_that_crosses_pages_is_refused() -> None:
    """R7: pages hold whole pools, or a pool's rows would be read from another sequence."""
    odd = dataclasses.replace(LATENT, indexer=dataclasses.replace(INDEXER, pool=3, top_tokens=15))
    check_geometry(odd)
    with pytest.raises(ConfigRefused, match="index_kpool"):
        check_geometry(odd, PAGE)
    with pytest.raises(ConfigRefused, match="kv_lora_rank"):
        check_geometry(dataclasses.replace(LATENT, rank=0))


def test_a_row_has_one_address() -> None:
    """R6."""
    pages = an_index()
    assert pages.row_address(0, 96) == (0, 0)
    assert pages.row_address(1, 96) == (32, 1)
    assert pages.row_address(95, 96) == (95 * 32, 95)
    for row in (-1, 96):
        with pytest.raises(IndexError):
            pages.row_address(row, 96)


def test_a_fresh_cursor_is_empty() -> None:
    """R5, R9."""
    cursor = a_cursor()
    assert len(cursor) == 0
    assert cursor.is_empty()
    assert cursor.capacity() == 100
    assert not a_cursor(1).is_empty()


def test_room_is_relative_to_the_cursor() -> None:
    """R10: the text names the end row, the capacity and the setting that raises it."""
    cursor = a_cursor(100)
    cursor.ensure_room(0)
    with pytest.raises(CapacityExceeded, match=r"101.*100.*--max-context"):
        cursor.ensure_room(1)
    with pytest.raises(ValueError, match="-1"):
        cursor.ensure_room(-1)
    assert len(cursor) == 100


def test_room_through_is_absolute() -> None:
    """R11: before a replay the cursor may stand ahead of the sequence."""
    cursor = a_cursor(100)
    cursor.ensure_room_through(100)
    with pytest.raises(CapacityExceeded):
        cursor.ensure_room_through(101)


def test_advance_neither_clamps_nor_wraps() -> None:
    """R12."""
    cursor = a_cursor()
    cursor.advance(99)
    cursor.advance(1)
    with pytest.raises(CapacityExceeded):
        cursor.advance(1)
    assert len(cursor) == 100


def test_rewind_goes_back_only() -> None:
    """R13, R25: the watermark of pool keys goes down with the rows."""
    cursor = a_cursor(23)
    assert standing(cursor) == (23, 5)
    cursor.rewind_to(23)
    assert standing(cursor) == (23, 5)
    cursor.rewind_to(18)
    assert standing(cursor) == (18, 4)
    with pytest.raises(ForwardRewind):
        cursor.rewind_to(19)
    with pytest.raises(ValueError, match="-1"):
        cursor.rewind_to(-1)
    assert standing(cursor) == (18, 4)


def test_sync_reconciles_and_checks_before_it_moves() -> None:
    """R14."""
    cursor = a_cursor(10)
    cursor.sync_to(10, 3)
    assert len(cursor) == 13
    cursor.sync_to(11, 3)
    assert len(cursor) == 14
    for committed, rows, error in ((15, 1, RowsMissing), (12, 89, CapacityExceeded)):
        with pytest.raises(error):
            cursor.sync_to(committed, rows)
        assert standing(cursor) == (14, 3)


@pytest.mark.parametrize("seed", range(3))
def test_drift_of_rejected_drafts_never_adds_up(seed: int) -> None:
    """R14, R35: 10,000 verify steps with random drafts and random acceptance."""
    choose = random.Random(seed)
    cursor = a_cursor(capacity=100_000)
    committed = 0
    for turn in range(10_000):
        rows = choose.randint(1, 4)
        if turn % 2:  # an eager step, layer by layer (R27)
            cursor.begin_step(committed, rows)
            assert len(cursor) == committed
            cursor.advance(rows)
            cursor.mark_pooled()
        else:  # a replayed one (R50)
            cursor.ensure_room_through(committed + rows)
            cursor.sync_to(committed, rows)
        assert standing(cursor) == (committed + rows, (committed + rows) // 4)
        committed += choose.randint(1, rows)


def test_a_step_is_checked_before_anything_moves() -> None:
    """R26, R27: lockstep, then room; a refused step leaves the cursor ahead as it was."""
    cursor = a_cursor(20)
    with pytest.raises(RowsMissing, match="21"):
        cursor.begin_step(21, 1)
    with pytest.raises(CapacityExceeded):
        cursor.begin_step(18, 83)
    with pytest.raises(ValueError, match="from -1"):
        cursor.begin_step(-1, 1)
    assert len(cursor) == 20
    cursor.begin_step(18, 82)
    assert len(cursor) == 18


@pytest.mark.parametrize(
    ("rows", "pools", "complete", "selected"),
    [
        (3, 1, 0, 0),
        (7, 2, 1, 1),
        (16_384, 4_096, 4_096, 512),
        (262_144, 65_536, 65_536, 512),
    ],
)
def test_geometry_of_a_selection(rows: int, pools: int, complete: int, selected: int) -> None:
    """R15: at the released sizes the output row is 2,051 wide, whatever the context."""
    released = Indexer(heads=32, dim=128, top_tokens=2048, pool=4)
    cursor = a_cursor(rows, capacity=262_144, indexer=released)
    assert cursor.geometry(1) == Geometry(pools, complete, selected, 2051)


def test_a_selection_over_nothing_has_no_geometry() -> None:
    """R15."""
    for cursor, queries in ((a_cursor(), 1), (a_cursor(5), 0)):
        with pytest.raises(ValueError, match="queries"):
            cursor.geometry(queries)


CALLS: dict[str, Callable[[IndexCursor], object]] = {
    "len": len,
    "is_empty": IndexCursor.is_empty,
    "capacity": IndexCursor.capacity,
    "pooled": lambda cursor: cursor.pooled,
    "ensure_room": lambda cursor: cursor.ensure_room(0),
    "ensure_room_through": lambda cursor: cursor.ensure_room_through(0),
    "advance": lambda cursor: cursor.advance(0),
    "rewind_to": lambda cursor: cursor.rewind_to(0),
    "check_step": lambda cursor: cursor.check_step(0, 0),
    "begin_step": lambda cursor: cursor.begin_step(0, 0),
    "sync_to": lambda cursor: cursor.sync_to(0, 0),
    "mark_pooled": IndexCursor.mark_pooled,
    "geometry": lambda cursor: cursor.geometry(1),
    "restored": lambda cursor: cursor.restored(0),
    "reuse": lambda cursor: cursor.reuse(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_released_cursor_refuses_every_call(call: str) -> None:
    """R59: releasing twice is fine, anything else is not."""
    assert set(CALLS) == {n for n in vars(IndexCursor) if n[0] != "_"} - {"release"} | {"len"}
    cursor = a_cursor(9)
    cursor.release()
    cursor.release()
    with pytest.raises(StateReleased, match="slot 3, layer 7"):
        CALLS[call](cursor)


# -- snapshots and pool keys -----------------------------------------------------------------------


def an_index(pages: int = 6, indexer: Indexer = INDEXER) -> IndexPages:
    index = IndexPages(a_device(), indexer, pages=pages, page_tokens=PAGE)
    for array in (index.keys, index.gates, index.pooled):
        array[:] = np.nan
    index.valid[:] = 0xFF
    return index


def write(index: IndexPages, table: Array, first: int, count: int, *, seed: int = 0) -> None:
    """Rows [first, first + count) of a sequence, and the pools that they complete."""
    choose = np.random.default_rng(seed)
    rows = rows_of([(first, count)], table=table[None], page_tokens=PAGE)
    key, gate = (choose.standard_normal((count, 8)).astype(np.float32) for _ in range(2))
    ops = ReferenceOps(a_device())
    ops.index_write(index.keys, index.gates, index.valid, key, gate, rows)
    ops.index_pool(index.pooled, index.keys, index.gates, index.valid, APE, rows)


APE = np.random.default_rng(9).standard_normal((4, 8)).astype(np.float32)


def recomputed(index: IndexPages, table: Array, pools: int) -> Array:
    """All pool keys of a sequence, from its raw rows."""
    fresh = np.full_like(index.pooled, np.nan)
    rows = rows_of([(0, pools * 4)], table=table[None], page_tokens=PAGE)
    ops = ReferenceOps(a_device())
    ops.index_pool(fresh, index.keys, index.gates, index.valid, APE, rows)
    return fresh[table].reshape(-1, 8)[:pools]


def test_kept_pool_keys_equal_a_full_recompute() -> None:
    """R18, R25: byte for byte, over odd steps, a rewind into a pool, and rows written again."""
    index, table, cursor = an_index(), np.array([4, 1, 5]), a_cursor(capacity=48)
    for turn, (committed, count) in enumerate([(0, 7), (7, 1), (8, 9), (14, 5), (18, 20), (33, 4)]):
        cursor.begin_step(committed, count)
        write(index, table, committed, count, seed=turn)
        cursor.advance(count)
        cursor.mark_pooled()
        kept = index.pooled[table].reshape(-1, 8)[: cursor.pooled]
        np.testing.assert_array_equal(kept, recomputed(index, table, cursor.pooled))
        assert cursor.pooled == len(cursor) // 4

    index.keys.view(np.uint32)[4, 3, 5] ^= 1 << 20  # the control: one flipped bit is seen
    kept = index.pooled[table].reshape(-1, 8)[: cursor.pooled]
    assert not np.array_equal(kept, recomputed(index, table, cursor.pooled))


def test_a_snapshot_comes_back_in_other_pages() -> None:
    """R16: header and the rows written, not the capacity."""
    index, table, cursor = an_index(), np.array([2, 0]), a_cursor(capacity=32)
    write(index, table, 0, 21)
    cursor.advance(21)
    cursor.mark_pooled()
    blob = index.snapshot(cursor, table)
    assert len(blob) == 16 + 21 * (2 * 8 * 4 + 1)

    other, there = a_cursor(5, capacity=32), np.array([5, 3])
    index.restore(other, there, blob)
    assert standing(other) == (21, 0)  # pool keys are made anew from the rows
    for array in (index.keys, index.gates, index.valid[:, :, None]):
        rows = [array[ids].reshape(-1, array.shape[2])[:21] for ids in (table, there)]
        np.testing.assert_array_equal(rows[0], rows[1])


@pytest.mark.parametrize("damage", ["cut", "grown", "mark", "width", "rows", "empty"])
def test_a_damaged_snapshot_changes_nothing(damage: str) -> None:
    """R16: checked before the first copy; the cursor stays."""
    index, table, cursor = an_index(), np.array([2, 0]), a_cursor(capacity=32)
    write(index, table, 0, 21)
    cursor.advance(21)
    blob = bytearray(index.snapshot(cursor, table))
    match damage:
        case "cut":
            del blob[-1]
        case "grown":
            blob += b"\0"
        case "mark":
            blob[0] ^= 1
        case "width":
            blob[4] += 1
        case "rows":
            blob[8] += 1
        case "empty":
            blob.clear()
    before = index.keys.copy()
    other = a_cursor(5, capacity=32)
    with pytest.raises(RequestFault, match="compute the prompt again"):
        index.restore(other, np.array([5, 3]), bytes(blob))
    np.testing.assert_array_equal(index.keys, before)
    assert standing(other) == (5, 1)


def test_a_snapshot_larger_than_the_cursor_may_have_is_refused() -> None:
    """R16."""
    index, table, cursor = an_index(), np.array([2, 0]), a_cursor(capacity=32)
    write(index, table, 0, 21)
    cursor.advance(21)
    small = a_cursor(capacity=20)
    with pytest.raises(CapacityExceeded):
        index.restore(small, np.array([5, 3]), index.snapshot(cursor, table))
    assert small.is_empty()

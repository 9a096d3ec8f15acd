"""Image rows land at their prompt positions, bit for bit, or the call is refused untouched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.device import Array
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import NotResident, RequestFault, ShapeMismatch
from engine.messages import Inject
from engine.models.overlay import (
    Overlay,
    Span,
    require_resident,
    splice,
)
from engine.ops.reference.ops import ReferenceOps

HIDDEN = 8
Spans = list[tuple[int, int, int]]


def a_device(generation: int = 0, ordinal: int = 0) -> HostDevice:
    return HostDevice(f"cpu:{ordinal}", ordinal, generation)


def rows_on(device: HostDevice, count: int, hidden: int = HIDDEN) -> Array:
    values = np.arange(1, count * hidden + 1, dtype=np.float32).reshape(count, hidden)
    return device.upload(values)


def an_overlay(spans: Spans, device: HostDevice | None = None) -> Overlay:
    device = device or a_device()
    rows = max(row + count for _, row, count in spans)
    return Overlay.of(rows_on(device, rows), spans, device, HIDDEN)


def spans_of(overlay: Overlay | None) -> Spans:
    return [(s.position, s.row, s.length) for s in overlay.spans] if overlay else []


@st.composite
def overlays(draw: st.DrawFn) -> tuple[Overlay, int]:
    """An overlay of up to five pictures, some of them the same one, and its prompt's length."""
    spans: Spans = []
    at = rows = 0
    for _ in range(draw(st.integers(1, 5))):
        at += draw(st.integers(0, 6))
        again = draw(st.integers(0, 2 * len(spans)))
        if again < len(spans):
            _, row, count = spans[again]
        else:
            row, count = rows, draw(st.integers(1, 9))
            rows += count
        spans.append((at, row, count))
        at += count
    return an_overlay(spans), at + draw(st.integers(0, 6))


# -- the object -----------------------------------------------------------------------------


def test_rows_of_the_trunks_width_and_type_are_taken() -> None:
    """Rule 1."""
    device = a_device()
    rows = rows_on(device, 256, 64)

    overlay = Overlay.of(rows, [(0, 0, 256)], device, 64)

    assert overlay.rows is rows
    assert overlay.residency == device.residency


@pytest.mark.parametrize(
    "rows",
    [
        np.ones((4, HIDDEN + 1), np.float32),
        np.ones((4, HIDDEN), np.float16),
        np.ones((4, HIDDEN), np.float64),
        np.ones((4, 2 * HIDDEN), np.float32)[:, ::2],
        np.ones((HIDDEN, 4), np.float32).T,
        np.ones((0, HIDDEN), np.float32),
        np.ones(4 * HIDDEN, np.float32),
    ],
    ids=["width", "float16", "float64", "strided", "transposed", "empty", "flat"],
)
def test_rows_of_another_shape_are_refused(rows: Array) -> None:
    """Rule 1: a mismatch would copy plausible garbage."""
    device = a_device()
    buffer = device.upload(rows) if rows.flags.c_contiguous else rows

    with pytest.raises(ShapeMismatch):
        Overlay.of(buffer, [(0, 0, 4)], device, HIDDEN)


@pytest.mark.parametrize(
    "spans",
    [[(5, 0, 4), (20, 4, 4)], [(5, 0, 8), (20, 0, 8)], [(0, 0, 4), (4, 4, 4)]],
    ids=["apart", "the same picture twice", "side by side"],
)
def test_spans_that_obey_the_law_are_taken(spans: Spans) -> None:
    """Rule 2."""
    assert spans_of(an_overlay(spans)) == spans


@pytest.mark.parametrize(
    "spans",
    [
        [(5, 0, 4), (8, 4, 4)],
        [(5, 0, 0), (20, 0, 8)],
        [(5, 0, 4), (20, 5, 4)],
        [(5, 0, 4), (20, 4, 3)],
        [(5, 0, 3), (20, 4, 4)],
        [(20, 0, 4), (5, 4, 4)],
        [(-1, 0, 8)],
        [(5, -1, 9)],
        [(5, 0, 9)],
        [],
    ],
    ids=["overlap", "no row", "beyond the rows", "unused last row", "unused inner row", "unsorted",
         "negative position", "negative row", "too many rows", "no span"],
)  # fmt: skip
def test_spans_that_break_the_law_are_refused(spans: Spans) -> None:
    """Rule 2: an unused row or an overlap means that pictures and placeholders went out of step."""
    device = a_device()
    with pytest.raises(RequestFault):
        Overlay.of(rows_on(device, 8), spans, device, HIDDEN)


def test_residency_is_asked_of_the_buffer_not_of_the_caller() -> None:
    """Rule 3: rows made in another stage's context are refused, the label is not adjusted."""
    tower, other = a_device(), a_device(ordinal=1)

    with pytest.raises(NotResident, match="cpu:0"):
        Overlay.of(rows_on(other, 4), [(0, 0, 4)], tower, HIDDEN)
    with pytest.raises(NotResident):  # memory that no context of ours owns
        Overlay.of(np.ones((4, HIDDEN), np.float32), [(0, 0, 4)], tower, HIDDEN)


def test_residency_is_equality_of_contexts_not_of_objects() -> None:
    """Rule 4: another object for the same context reads it; a second context does not."""
    device = a_device()
    overlay = an_overlay([(0, 0, 4)], device)
    engine = a_device()
    engine.residency = device.residency  # two engines on one device's primary context
    require_resident(overlay, engine)

    for other in (a_device(), a_device(ordinal=1)):
        with pytest.raises(NotResident):
            require_resident(overlay, other)
    older = a_device()
    older.residency = device.residency._replace(generation=1)
    with pytest.raises(NotResident):
        require_resident(overlay, older)


def test_an_overlay_cannot_be_changed() -> None:
    """Rule 6."""
    overlay: Any = an_overlay([(0, 0, 4)])
    for field in ("rows", "spans", "residency"):
        with pytest.raises(AttributeError):
            setattr(overlay, field, None)


# -- windows --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "call", "want"),
    [
        ([(5, 0, 4)], (0, 20), [(5, 0, 4)]),
        ([(5, 0, 4)], (6, 2), [(0, 1, 2)]),
        ([(5, 0, 4)], (8, 10), [(0, 3, 1)]),
        ([(5, 0, 4), (20, 4, 4)], (7, 15), [(0, 2, 2), (13, 4, 2)]),
        ([(5, 0, 4)], (9, 10), []),
    ],
)
def test_window_arithmetic(spans: Spans, call: tuple[int, int], want: Spans) -> None:
    """Rule 7, its table."""
    assert spans_of(an_overlay(spans).window(*call)) == want


def test_no_image_row_means_no_window() -> None:
    """Rule 8: an empty range gives None; a negative one is refused."""
    overlay = an_overlay([(5, 0, 4)])

    assert overlay.window(0, 5) is None
    assert overlay.window(6, 0) is None
    for bad in ((-1, 5), (5, -1)):
        with pytest.raises(RequestFault):
            overlay.window(*bad)


def test_a_thousand_windows_cost_no_memory() -> None:
    """Rule 9: the same address, no allocation, and an allocator that fails is never called."""
    board = FaultBoard()
    device = HostDevice("cpu:0", 0, 0, board)
    rows = rows_on(device, 256, 4096)  # 4 MiB
    overlay = Overlay.of(rows, [(3, 0, 256)], device, 4096)
    before = device.allocations
    board.order(Inject("out_of_memory", "alloc"))

    windows = [overlay.window(start, 100) for start in range(250)] * 4

    assert len(windows) == 1000
    assert all(window is not None and window.rows is rows for window in windows)
    assert device.allocations == before
    assert board.armed  # the order still waits


@given(made=overlays(), data=st.data())
@settings(max_examples=1000, deadline=None)
def test_windows_compose(made: tuple[Overlay, int], data: st.DataObject) -> None:
    """Rule 10: a window of a window is one window; a partition gives back the whole."""
    overlay, length = made
    numbers = st.integers(0, length + 3)
    a, n, b, m = (data.draw(numbers) for _ in range(4))
    outer = overlay.window(a, n)
    inner = outer.window(b, m) if outer else None
    assert spans_of(inner) == spans_of(overlay.window(a + b, max(0, min(m, n - b))))

    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    covered: dict[int, int] = {}
    for start, end in pairwise(cuts):
        for position, row, count in spans_of(overlay.window(start, end - start)):
            covered |= {start + position + i: row + i for i in range(count)}
    whole = {p + i: row + i for p, row, count in spans_of(overlay) for i in range(count)}
    assert covered == whole


def test_windows_inherit_residency() -> None:
    """Rule 11."""
    device, other = a_device(), a_device(ordinal=1)
    window = an_overlay([(5, 0, 4)], device).window(6, 2)
    assert window is not None

    splice(device.zeros((2, HIDDEN), np.float32), window, device, ReferenceOps(device))
    with pytest.raises(NotResident):
        splice(other.zeros((2, HIDDEN), np.float32), window, other, ReferenceOps(other))


# -- splice ---------------------------------------------------------------------------------


@given(made=overlays(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_splice_overwrites_exactly_the_covered_rows(
    made: tuple[Overlay, int], data: st.DataObject
) -> None:
    """Rules 25 and 26: wherever the prompt is cut, bit for bit; special floats included."""
    overlay, length = made
    device = a_device()
    device.residency = overlay.residency
    overlay.rows.view(np.uint32)[0, :3] = (0x7FC0_1234, 0x8000_0000, 0x0000_0001)
    text = np.random.default_rng(3).standard_normal((length, HIDDEN)).astype(np.float32)
    want = text.copy()
    for position, row, count in spans_of(overlay):
        want[position : position + count] = overlay.rows[row : row + count]

    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    got = []
    for start, end in pairwise(cuts):
        x = device.upload(text[start:end])
        window = overlay.window(start, end - start)
        if window is not None:
            splice(x, window, device, ReferenceOps(device))
        got.append(x)

    assert np.array_equal(np.concatenate(got).view(np.uint32), want.view(np.uint32))


def test_a_splice_that_is_refused_leaves_the_target_untouched() -> None:
    """Rules 5 and 27: another width, a call too short, a foreign context; nothing was launched."""
    device = a_device()
    overlay = an_overlay([(1, 0, 4)], device)
    ops = ReferenceOps(device)
    foreign = a_device(ordinal=1)
    cases: list[tuple[HostDevice, tuple[int, ...], type[RequestFault], str]] = [
        (device, (5, HIDDEN + 1), ShapeMismatch, "8 wide"),
        (device, (4, HIDDEN), ShapeMismatch, "ends at row 5, the call has 4"),
        (device, (5, 2, HIDDEN), ShapeMismatch, "8 wide"),
        (foreign, (5, HIDDEN), NotResident, "cpu:1"),
    ]
    for where, shape, error, line in cases:
        x = where.zeros(shape, np.float32)
        with pytest.raises(error, match=line):
            splice(x, overlay, where, ops)
        assert not x.any()


def test_a_span_says_where_it_ends() -> None:
    """Rule 7: half-open."""
    assert Span(5, 0, 4).end == 9

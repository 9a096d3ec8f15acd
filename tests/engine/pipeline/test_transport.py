"""Rows cross between contexts bit for bit, by a way that was proven, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from engine.config import Transport as Wanted
from engine.device.device import Array, Device
from engine.device.host import HostDevice
from engine.errors import ConfigError, NotResident, OutOfMemory, RequestFault, ShapeMismatch
from engine.models.streams import payload, row_shape
from engine.pipeline.boundary import Boundary
from engine.pipeline.transport import DirectCopy, HostBounce, Link, Route, choose
from engine.spec import HyperConnections, ModelSpec
from tests.fakes.pipeline import SPEC

HIDDEN, STREAMS, ROWS = 12, 2, 40


class Island(HostDevice):
    """It can read nobody's memory, though others can read its own."""

    def reaches(self, other: Device) -> bool:
        return other is self


class Flipping(HostDevice):
    """A copy of more than 8 rows from another device arrives with one bit turned over."""

    def copy(self, array: Array, into: Array, source: Device) -> None:
        super().copy(array, into, source)
        if len(into) > 8:
            into.view(np.uint32)[-1, -1] ^= 1


class Idle(HostDevice):
    """Says that it copied from another device, and did not."""

    def copy(self, array: Array, into: Array, source: Device) -> None:
        pass


class Deaf(Flipping):
    """Copies from the host are damaged, too."""

    def store(self, array: Array, into: Array) -> None:
        super().store(array, into)
        into.view(np.uint32)[0, 0] ^= 1 << 31


def pair(kind: type[HostDevice] = HostDevice) -> tuple[HostDevice, HostDevice]:
    return HostDevice("cpu:0", 0, 0), kind("cpu:1", 1, 0)


def chosen(one: HostDevice, other: HostDevice, wanted: Wanted) -> Link:
    return choose(one, other, wanted, rows=ROWS, width=HIDDEN)


# -- the way ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "route"), [("auto", Route.PEER), ("peer", Route.PEER), ("host", Route.HOST)]
)
def test_between_two_contexts_the_setting_decides(wanted: Wanted, route: Route) -> None:
    """Rules 68, 72: and every width is probed in both directions."""
    link = chosen(*pair(), wanted)

    assert link.route is route
    assert link.probes == 2 * 4  # 1, 8, 16 and all rows


@pytest.mark.parametrize("wanted", ["auto", "peer", "host"])
def test_in_one_context_rows_are_copied_where_they_are(wanted: Wanted) -> None:
    """Rule 68; two stages on one device share its context (rule 4)."""
    one, _ = pair()

    assert chosen(one, one, wanted).route is Route.LOCAL


def test_a_second_context_on_the_same_device_is_another_place() -> None:
    """Rule 4."""
    one, other = HostDevice("cpu:0", 0, 0), HostDevice("cpu:0", 0, 0)

    assert chosen(one, other, "auto").route is Route.PEER


@pytest.mark.parametrize("kind", [Island, Flipping, Idle])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_that_cannot_goes_through_the_host_and_says_so(
    kind: type[HostDevice], swapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Rules 70, 72: each ordered pair counts, and one wrong byte is enough."""
    one, other = pair(kind)
    if swapped:
        one, other = other, one

    assert chosen(one, other, "auto").route is Route.HOST

    (line,) = caplog.messages
    assert "go through the host" in line
    assert ("cannot read" if kind is Island else "came back wrong") in line


@pytest.mark.parametrize("kind", [Island, Flipping, Idle])
def test_a_pair_that_cannot_is_refused_where_peer_was_insisted_on(kind: type[HostDevice]) -> None:
    """Rules 70, 72: exit 2, with the legal values."""
    with pytest.raises(ConfigError, match=r"--transport peer: .*cpu:0 and cpu:1.*auto or host"):
        chosen(*pair(kind), "peer")


def test_the_host_needs_no_capability() -> None:
    """Rule 69."""
    assert chosen(*pair(Island), "host").route is Route.HOST


def test_without_any_way_that_keeps_the_bytes_nothing_is_served() -> None:
    with pytest.raises(ConfigError, match="through the host between cpu:0 and cpu:1"):
        chosen(*pair(Deaf), "auto")


def test_probes_leave_nothing_behind() -> None:
    one, other = pair()
    before = one.allocations, other.allocations

    chosen(one, other, "auto")
    chosen(one, other, "host")

    assert (one.allocations, other.allocations) == before


# -- the bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [Route.PEER, Route.HOST])
def test_every_bit_arrives(route: Route) -> None:
    """Rule 17: payloads of NaN, signed zeros, infinities and denormals."""
    one, other = pair()
    special = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0, 0x7F800000, 0xFF800000, 1]
    bits = np.array([special], np.uint32)
    sent, got = one.upload(bits.view(np.float32)), other.zeros((1, 8), np.float32)

    Link(one, other, route, 0).transport(8).copy(sent, got)

    assert np.array_equal(other.download(got).view(np.uint32), bits)
    assert other.locate(got) == other.residency


def test_memory_on_the_way_is_of_no_context() -> None:
    one, other = pair()
    bounce = HostBounce(one, other, 8)

    assert one.locate(bounce._memory) is None
    assert one.allocations == (0, 0)


def test_exactly_the_payload_moves() -> None:
    """Rules 66, 69."""
    one, other = pair()
    rows, room = one.zeros((2, 8), np.float32), other.zeros((3, 8), np.float32)

    for transport in (DirectCopy(one, other), HostBounce(one, other, 99)):
        with pytest.raises(ShapeMismatch, match="exactly the payload"):
            transport.copy(rows, room)
    with pytest.raises(ShapeMismatch, match="15 floats"):
        HostBounce(one, other, 15).copy(rows, room[:2])
    assert not room.any()


# -- the boundary ----------------------------------------------------------------------------------


def a_spec(streams: int | None = STREAMS) -> ModelSpec:
    hyper = HyperConnections(streams=streams, eps=1e-6, rounds=1) if streams else None
    return dataclasses.replace(SPEC, hidden=HIDDEN, residual=hyper)


class Crossing:
    """A boundary between two devices, and rows to send."""

    def __init__(self, wanted: Wanted = "auto", streams: int | None = STREAMS) -> None:
        self.one, self.other = pair()
        self.spec = a_spec(streams)
        self.boundary = Boundary(chosen(self.one, self.other, wanted), self.spec, rows=ROWS)

    def rows(self, count: int, device: HostDevice | None = None) -> Array:
        shape = (count, *row_shape(self.spec))
        values = np.random.default_rng(count).standard_normal(shape, np.float32)
        return (device or self.one).upload(values)


@pytest.mark.parametrize("streams", [None, STREAMS])
@pytest.mark.parametrize("wanted", ["peer", "host"])
def test_rows_arrive_in_the_context_of_the_next_stage(wanted: Wanted, streams: int | None) -> None:
    """Rule 67: all that the next layer reads, and counted."""
    crossing = Crossing(wanted, streams)

    for count in (1, ROWS, 7):
        rows = crossing.rows(count)
        got = crossing.boundary.send(rows)
        assert got.shape == rows.shape
        assert np.array_equal(payload(got, crossing.spec), payload(rows, crossing.spec))
        assert crossing.other.locate(got) == crossing.other.residency
        crossing.boundary.done()

    assert (crossing.boundary.copies, crossing.boundary.rows) == (3, ROWS + 8)


def test_two_slots_are_used_in_turn_and_nothing_is_allocated() -> None:
    """Rules 64, 65: persistent; the one being read is not written."""
    crossing = Crossing()
    before = crossing.other.allocations
    sent = []
    for count in (2, 3, 4):
        sent.append(crossing.boundary.send(crossing.rows(count)))
        crossing.boundary.done()

    assert not np.shares_memory(sent[0], sent[1])
    assert np.shares_memory(sent[0], sent[2])
    assert crossing.other.allocations == before


def test_a_slot_that_is_still_read_is_not_written() -> None:
    """Rule 64: counted and refused."""
    crossing = Crossing()
    first = crossing.boundary.send(crossing.rows(2))
    kept = first.copy()
    crossing.boundary.send(crossing.rows(3))

    with pytest.raises(RequestFault, match="still being read"):
        crossing.boundary.send(crossing.rows(4))

    assert crossing.boundary.collisions == 1
    assert crossing.boundary.copies == 2
    assert np.array_equal(first, kept, equal_nan=True)


def test_a_payload_of_another_size_is_refused() -> None:
    """Rule 66: none, too many, another shape, another type; nothing is counted."""
    crossing = Crossing()
    rows = crossing.rows(3)
    wrong = [rows[:0], crossing.rows(ROWS + 1), rows[:, :1], rows.astype(np.float64)]

    for bad in wrong:
        with pytest.raises(ShapeMismatch, match="1 to 40 rows"):
            crossing.boundary.send(bad)

    assert crossing.boundary.copies == 0


def test_rows_of_another_context_are_not_sent() -> None:
    """R105: refused, never relabelled."""
    crossing = Crossing()

    for stranger in (crossing.rows(2, crossing.other), np.zeros((2, 3, HIDDEN), np.float32)):
        with pytest.raises(NotResident, match="only rows of the sending stage"):
            crossing.boundary.send(stranger)

    assert crossing.boundary.copies == 0


def test_no_room_for_a_slot_is_no_fault() -> None:
    """Rule 89 for a boundary's memory."""

    class Full(HostDevice):
        def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
            del shape, dtype
            raise OutOfMemory("full")

    one, other = pair(Full)
    link = chosen(one, other, "auto")

    with pytest.raises(OutOfMemory):
        Boundary(link, a_spec(), rows=ROWS)

"""Image rows reach the device of stage 0 once, whole, by a proven way, or the server says so."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from engine.config import PublishMode
from engine.device.device import Array, Device, Residency
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import NotResident, OutOfMemory, RequestFault
from engine.messages import Inject, Picture
from engine.models.overlay import Overlay
from engine.ops.reference.ops import ReferenceOps
from engine.pipeline.transport import Link, Route
from tests.fakes.split import SplitDecoder
from vision.overlay import Delivery, Publisher, lay_out, resolve

TINY = Path(__file__).parents[1] / "fixtures" / "glm5_next_tiny"
HIDDEN = 16
HERE, THERE = Residency(0, 0, 1), Residency(0, 1, 2)


@pytest.mark.parametrize(
    ("mode", "tower", "intake", "want"),
    [
        ("auto", HERE, HERE, Delivery.AS_IS),
        ("auto", HERE, THERE, Delivery.PUBLISH),
        ("force", HERE, HERE, Delivery.PUBLISH),
        ("force", HERE, THERE, Delivery.PUBLISH),
        ("off", HERE, HERE, Delivery.AS_IS),
        ("off", HERE, THERE, Delivery.DISABLED),
        ("auto", None, HERE, Delivery.DISABLED),
        ("force", HERE, None, Delivery.DISABLED),
        ("off", None, None, Delivery.DISABLED),
    ],
)
def test_a_mode_and_a_placement_have_one_meaning(
    mode: PublishMode, tower: Residency | None, intake: Residency | None, want: Delivery
) -> None:
    """Rules 12 to 16: unknown placement fails closed."""
    assert resolve(mode, tower, intake) is want


@pytest.mark.parametrize("other", [Residency(0, 0, 2), Residency(1, 0, 1), Residency(0, 1, 1)])
def test_residency_is_all_three_numbers(other: Residency) -> None:
    """Rule 4: another context on the device, an older worker, another device."""
    assert resolve("auto", other, HERE) is Delivery.PUBLISH


class Published:
    """A tower's device, an intake device, and what is between them."""

    def __init__(self, route: Route, board: FaultBoard | None = None) -> None:
        self.tower = HostDevice("cpu:1", 1, 0, board)
        self.intake = self.tower if route is Route.LOCAL else HostDevice("cpu:0", 0, 0, board)
        self.counters: dict[str, float] = {}
        self.publisher = Publisher(Link(self.tower, self.intake, route, 8), "auto", self.counters)
        self.name = f"overlay_publications_{route}_total"

    def overlay(self, rows: Array | None = None, device: Device | None = None) -> Overlay:
        device = device or self.tower
        if rows is None:
            rows = np.random.default_rng(1).standard_normal((6, HIDDEN), np.float32)
        spans = [(3, 0, 4), (9, 4, 2), (20, 0, 4)]
        return Overlay.of(device.upload(rows), spans, device, HIDDEN)


@pytest.mark.parametrize("route", Route)
def test_published_rows_are_the_same_bits_elsewhere(route: Route) -> None:
    """Rules 14, 17: NaN payloads and signed zeros too; spans unchanged; counted once."""
    bench = Published(route)
    bits = np.random.default_rng(3).integers(0, 2**32, (6, HIDDEN), np.uint32)
    bits[0, :6] = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0xFF800000, 1]
    before = bench.overlay(bits.view(np.float32))

    after = bench.publisher.publish(before)

    assert np.array_equal(after.rows.view(np.uint32), bits)
    assert after.spans == before.spans
    assert after.residency == bench.intake.residency
    assert bench.intake.locate(after.rows) == bench.intake.residency
    assert not np.shares_memory(after.rows, before.rows)
    assert bench.counters == {
        f"overlay_publications_{other}_total": float(other is route) for other in Route
    }


def test_a_publication_has_one_receipt(caplog: pytest.LogCaptureFixture) -> None:
    """Rule 24: source, destination, rows, bytes, mode, route."""
    caplog.set_level(logging.INFO)
    bench = Published(Route.HOST)

    bench.publisher.publish(bench.overlay())

    assert caplog.messages == [
        "image rows published from cpu:1 to cpu:0: 6 rows, 384 bytes, mode auto, route host"
    ]


def test_rows_that_the_tower_does_not_have_are_not_published() -> None:
    """Rules 3, 5."""
    bench = Published(Route.PEER)

    with pytest.raises(NotResident):
        bench.publisher.publish(bench.overlay(device=bench.intake))

    assert bench.counters[bench.name] == 0


@pytest.mark.parametrize(
    ("route", "stage"), [(Route.PEER, 1), (Route.HOST, 1), (Route.HOST, 0)], ids=str
)
def test_no_room_leaves_no_trace(route: Route, stage: int) -> None:
    """Rule 22: on either device; the counter stands, the next one is published."""
    board = FaultBoard()
    bench = Published(route, board)  # enrolled: 0 is the tower's device, 1 is intake
    overlay = bench.overlay()
    before = bench.tower.allocations, bench.intake.allocations
    board.order(Inject("out_of_memory", "alloc", stage=stage))

    with pytest.raises(OutOfMemory):
        bench.publisher.publish(overlay)
    assert board.struck == 1
    assert bench.counters[bench.name] == 0
    assert (bench.tower.allocations, bench.intake.allocations) == before

    bench.publisher.publish(overlay)
    assert bench.counters[bench.name] == 1
    assert (bench.tower.allocations, bench.intake.allocations) == before


def test_rows_that_are_not_finite_are_not_published() -> None:
    """Rule 23: they end the request where they were made."""
    bench = Published(Route.PEER)
    rows = np.zeros((4, HIDDEN), np.float32)
    rows[3, 15] = np.nan
    picture = Picture(b"", (1, 4, 4), 0, 4, "d")

    with pytest.raises(RequestFault, match="not finite"):
        lay_out(
            {"d": bench.tower.upload(rows)},
            [picture],
            bench.tower,
            HIDDEN,
            ReferenceOps(bench.tower),
        )


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_the_tower_runs_on_the_last_stage_and_publishes_once(transport: str) -> None:
    """D10, rules 14, 21, 122: chunks and answers of the session publish nothing more."""
    decoder = SplitDecoder(TINY, (0, 3, 6), transport=transport)  # type: ignore[arg-type]
    tower, intake = decoder.devices[1], decoder.devices[0]
    assert tower.residency != intake.residency
    encoder = decoder.encoder
    assert encoder is not None
    spec = encoder.patches
    pixels = np.random.default_rng(5).integers(
        0, 256, (spec.merge**2 * spec.min_tokens, 3 * spec.patch**2), np.uint8
    )
    grid = (1, spec.merge, spec.merge * spec.min_tokens)
    picture = Picture(pixels.tobytes(), grid, 2, spec.min_tokens, "d")
    overlay = encoder.build([picture])
    assert overlay.residency == intake.residency
    prompt = [1, 2, *[decoder.spec.image_token or 0] * spec.min_tokens, 3, 4]

    decoder.greedy(0, prompt, 64, chunks=3, overlay=overlay)
    decoder.greedy(0, [1, 2, 3], 4)

    assert decoder.publications == 1

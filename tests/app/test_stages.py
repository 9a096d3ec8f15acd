"""A worker over several stages, as its configuration asks: placement, faults, pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.control import Vitals
from app.life import Machine
from app.worker import build
from engine.config import EngineConfig, PublishMode
from engine.device.faults import Latch
from engine.device.orders import FaultBoard
from engine.errors import ConfigError, ContextLost
from engine.messages import Carried, Event, Failed, Generate, Inject, RequestId, Token

TINY = Path(__file__).parents[1] / "fixtures" / "glm5_next_tiny"


class Built:
    """What a worker builds from its configuration."""

    def __init__(self, *devices: str, publish: PublishMode = "auto", **settings: object) -> None:
        self.board, self.latch, self.vitals = FaultBoard(), Latch(), Vitals()
        self.config = EngineConfig(
            model=str(TINY),
            devices=devices,
            max_sequences=4,
            max_context=256,
            page_tokens=16,
            memory_bytes=1 << 26,
            fault_injection=True,
            overlay_publish=publish,
            **settings,  # type: ignore[arg-type]
        )
        self.machine: Machine = build(
            self.config, self.board, self.latch, self.vitals, lambda _done, _total: None
        )
        self.vitals.judge = self.machine.judge

    def answer(self, prompt: tuple[int, ...] = (5, 6, 7, 8), tokens: int = 5) -> list[int]:
        engine = self.machine.engine
        engine.add(Generate(request=RequestId("r"), prompt=prompt, max_tokens=tokens))
        events: list[Event] = []
        while engine.busy:
            with self.board.during("step"):
                events += engine.step()
        assert not [event for event in events if isinstance(event, Failed)]
        return [event.id for event in events if isinstance(event, Token)]


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return Built("cpu:0").answer()


@pytest.mark.parametrize(
    ("devices", "route", "contexts"),
    [
        (("cpu:0", "cpu:1"), "peer", 2),
        (("cpu:0", "cpu:0"), "local", 1),
        (("cpu:1", "cpu:0", "cpu:1"), "peer", 2),
        (("cpu:0", "cpu:0", "cpu:1"), "local,peer", 2),
    ],
)
def test_a_worker_serves_on_every_placement(
    wanted: list[int], devices: tuple[str, ...], route: str, contexts: int
) -> None:
    """Rules 49, 83: repeated devices and both orders, for the serial walk."""
    built = Built(*devices)
    assert isinstance(built.machine.engine.self_test(), int)

    assert built.answer() == wanted

    pong = built.vitals.pong(1)
    assert (pong.transport.route, pong.transport.integrity) == (route, "ok")
    judge = built.machine.judge
    assert [device.name for device in judge.devices] == list(devices)
    assert len({device.residency for device in judge.devices}) == contexts
    assert built.vitals.counters["split_steps_total"] > 0


def test_one_stage_carries_nothing(wanted: list[int]) -> None:
    built = Built("cpu:0")

    assert built.answer() == wanted
    assert built.vitals.pong(1).transport == Carried(None, None)
    assert built.vitals.counters["split_steps_total"] == 0


def test_a_fence_that_disagrees_with_the_layers_is_found_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 48."""
    monkeypatch.setattr("app.worker.load_stages", None)

    with pytest.raises(ConfigError, match="--fence 0,3,7 does not rise from 0 to 6"):
        Built("cpu:0", "cpu:1", fence=(0, 3, 7))
    with pytest.raises(ConfigError, match="--stages is 7"):
        Built(*[f"cpu:{n}" for n in range(7)])


@pytest.mark.parametrize("fault", ["sticky", "returned"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fault_names_its_own_stage(fault: str, stage: int) -> None:
    """R107: latched once, with the stage and the device that no longer work."""
    built = Built("cpu:0", "cpu:1", "cpu:2")
    built.board.order(Inject(fault=fault, where="step", stage=stage, code=719))  # type: ignore[arg-type]

    with pytest.raises(ContextLost):
        built.answer()

    told = built.latch.fault
    assert told is not None
    assert (told.stage, told.device, told.code) == (stage, f"cpu:{stage}", 719)
    shown = [report.state for report in built.vitals.pong(1).stages]
    assert shown == ["faulted" if n == stage else "ok" for n in range(3)]


def test_a_failure_on_stage_1_alone_ends_one_request_and_leaves_no_trace(
    wanted: list[int],
) -> None:
    """R76, rule 61: the stages go on in step, nothing stays allocated."""
    built = Built("cpu:0", "cpu:1")
    built.answer()
    before = [device.allocations for device in built.machine.judge.devices]
    built.board.order(Inject(fault="isolated", where="step", stage=1, code=716))

    with pytest.raises(AssertionError):
        built.answer()

    assert built.latch.fault is None
    assert built.answer() == wanted
    assert [device.allocations for device in built.machine.judge.devices] == before


def test_idle_canaries_find_a_dead_stage_1() -> None:
    """Rule 102: every stage is asked."""
    built = Built("cpu:0", "cpu:1")
    built.board.order(Inject(fault="sticky", where="now", stage=1))

    built.machine.judge.canaries()

    assert built.latch.fault is not None
    assert (built.latch.fault.stage, built.latch.fault.device) == (1, "cpu:1")


def test_an_order_for_the_second_stage_of_one_device_strikes_it() -> None:
    built = Built("cpu:0", "cpu:0")
    built.board.order(Inject(fault="sticky", where="step", stage=1))

    with pytest.raises(ContextLost):
        built.answer()


def test_both_stages_of_one_device_count_its_memory_once() -> None:
    built = Built("cpu:0", "cpu:0")
    vitals = built.vitals

    device = built.machine.judge.devices[0]
    assert vitals.pong(1).allocations == device.allocations[0]


# -- pictures --------------------------------------------------------------------------------------


def test_pictures_are_off_where_rows_cannot_reach_stage_0() -> None:
    """Rule 15: decided at boot, with the reason."""
    built = Built("cpu:0", "cpu:1", publish="off")

    assert built.machine.loaded.patches is None
    assert "--overlay-publish is off" in (built.machine.loaded.pictures_off or "")
    assert isinstance(built.machine.engine.self_test(), int)


@pytest.mark.parametrize("devices", [("cpu:0",), ("cpu:0", "cpu:0")])
def test_off_serves_pictures_where_the_residency_is_equal(devices: tuple[str, ...]) -> None:
    """Rule 15; rule 13: nothing is copied."""
    built = Built(*devices, publish="off")

    built.machine.engine.self_test()

    assert built.machine.loaded.patches is not None
    assert built.machine.loaded.pictures_off is None
    assert not [n for name, n in built.vitals.counters.items() if "publications" in name and n]


@pytest.mark.parametrize(
    ("devices", "publish", "transport", "route"),
    [
        (("cpu:0", "cpu:1"), "auto", "auto", "peer"),
        (("cpu:0", "cpu:1"), "force", "host", "host"),
        (("cpu:0",), "force", "auto", "local"),
    ],
)
def test_pictures_are_published_once_a_session(
    devices: tuple[str, ...], publish: PublishMode, transport: str, route: str
) -> None:
    """Rules 14, 21: the self-test has one picture; a text request has none."""
    built = Built(*devices, publish=publish, transport=transport)
    name = f"overlay_publications_{route}_total"

    built.machine.engine.self_test()
    assert built.vitals.counters[name] == 1

    built.answer()
    assert built.vitals.counters[name] == 1

"""The judge goes by evidence and the latch keeps the first word (R76 to R83, rules 88, 89)."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine.device.faults import Judge, Latch, Verdict
from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import CapacityExceeded, DeviceError, OutOfMemory
from engine.messages import Fault, Inject


class Bench:
    """Two stages, a latch and a judge, with a board to order faults on."""

    def __init__(self) -> None:
        self.board = FaultBoard()
        self.stages = [HostDevice(f"cpu:{n}", n, 1, self.board) for n in (0, 1)]
        self.told: list[Fault] = []
        self.latch = Latch(self.told.append)
        self.judge = Judge(self.stages, self.latch)

    def failure(self, stage: int = 0) -> DeviceError:
        try:
            self.stages[stage].synchronize()
        except DeviceError as error:
            return error
        raise AssertionError("nothing failed")


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("text", ["716 misaligned address", "700 illegal address"])
def test_a_fatal_looking_error_is_the_requests_when_every_stage_answers(
    bench: Bench, text: str
) -> None:
    """R76: the code does not decide."""
    error = DeviceError("kda", code=716, device="cpu:0", detail=text)
    assert bench.judge.verdict(error, "step") is Verdict.REQUEST
    assert bench.latch.fault is None
    assert bench.judge.probes_passed == 1


def test_a_harmless_looking_error_is_the_workers_when_a_stage_is_dead(bench: Bench) -> None:
    """R76, R107: "invalid argument" with a failing probe is a lost context of that stage."""
    bench.board.order(Inject(fault="sticky", where="now", stage=1, code=700))
    error = DeviceError("linear", code=1, device="cpu:0", detail="invalid argument")

    assert bench.judge.verdict(error, "step") is Verdict.WORKER
    fault = bench.latch.fault
    assert fault is not None
    assert (fault.device, fault.stage) == ("cpu:1", 1)
    assert bench.told == [fault], "whoever waits for the latch is told at once"


def test_the_stage_that_failed_is_named_when_all_contexts_died_with_it(bench: Bench) -> None:
    """R107: on a card one illegal address takes every context of the process along."""
    for stage in (0, 1):
        bench.board.order(Inject(fault="sticky", where="now", stage=stage))
    assert bench.judge.verdict(bench.failure(stage=1), "tower") is Verdict.WORKER
    fault = bench.latch.fault
    assert fault is not None
    assert (fault.stage, fault.code, fault.call) == (1, 700, "synchronize")
    assert "tower" in fault.reason


@pytest.mark.parametrize(
    "error", [CapacityExceeded("row 9 of 8"), ValueError("a bug"), FloatingPointError("nan")]
)
def test_any_failure_is_probed_whatever_its_type(bench: Bench, error: Exception) -> None:
    """R82, rule 88: an asynchronous fault can show up behind any exception."""
    assert bench.judge.verdict(error, "step") is Verdict.REQUEST
    bench.board.order(Inject(fault="returned", where="now", code=719))
    assert bench.judge.verdict(error, "step") is Verdict.WORKER
    fault = bench.latch.fault
    assert fault is not None
    assert fault.code == 719


def test_no_room_never_reaches_the_probe(bench: Bench) -> None:
    """Rule 89: even with a dead stage, out of memory says nothing about it."""
    bench.board.order(Inject(fault="sticky", where="now"))
    assert bench.judge.verdict(OutOfMemory("no room"), "step") is Verdict.REQUEST
    assert (bench.judge.probes_passed, bench.judge.probes_failed) == (0, 0)


def test_a_full_device_still_answers_its_canary(bench: Bench) -> None:
    """R76: out of memory with a passing probe is isolated, also inside the probe."""
    bench.board.order(Inject(fault="out_of_memory", where="alloc"))
    bench.judge.canaries()
    assert bench.board.struck == 1
    assert bench.latch.fault is None


def test_an_idle_fault_is_found_by_the_canary_of_its_stage(bench: Bench) -> None:
    """R81: with its code, device and stage, though no request failed."""
    bench.judge.canaries()
    before = bench.judge.answered_at[0]
    bench.board.order(Inject(fault="sticky", where="idle", stage=1, code=702))
    with bench.board.during("idle"):
        bench.judge.canaries()
    fault = bench.latch.fault
    assert fault is not None
    assert (fault.code, fault.device, fault.stage) == (702, "cpu:1", 1)
    assert "idle" in fault.reason
    assert bench.judge.answered_at[0] >= before


def test_a_canary_that_fails_once_is_no_lost_stage(bench: Bench) -> None:
    """R76, R81: its failure is probed as any other, and a passing probe makes it isolated."""
    bench.board.order(Inject(fault="isolated", where="idle", stage=1, code=1))
    with bench.board.during("idle"):
        bench.judge.canaries()
    assert bench.board.struck == 1
    assert bench.latch.fault is None


def test_a_wrong_answer_is_a_lost_stage_even_without_an_error() -> None:
    """R76: the canary's work is compared on the host, not only its status."""

    class Forgetful(HostDevice):
        def download(self, array: np.ndarray) -> np.ndarray:
            return super().download(array) + 1

    latch, board = Latch(), FaultBoard()
    device = Forgetful("cpu:0", 0, 1, board)
    board.order(Inject(fault="isolated", where="load", code=1))  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        device.synchronize()
    judge = Judge([device], latch)
    assert judge.verdict(ValueError("anything"), "step") is Verdict.WORKER
    assert latch.fault is not None
    assert latch.fault.code == 0, "the code of an older failure is not quoted"


def test_a_latched_worker_touches_no_device_again(bench: Bench) -> None:
    """R80, R83: the probe does not run once the latch is set."""
    bench.board.order(Inject(fault="sticky", where="now"))
    bench.judge.canaries()
    probes = bench.judge.probes_failed
    bench.judge.canaries()
    assert bench.judge.verdict(ValueError("later"), "step") is Verdict.WORKER
    assert bench.judge.probes_failed == probes
    assert len(bench.told) == 1


def test_of_eight_writers_exactly_one_is_first_and_its_word_stays() -> None:
    """R78: first writer wins, never cleared."""
    latch, start, first = Latch(), threading.Barrier(8), []

    def write(n: int) -> None:
        start.wait()
        if latch.set(Fault(reason=f"writer {n}", code=n, call="c", device="cpu:0", stage=0)):
            first.append(n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first) == 1
    assert latch.fault is not None
    assert latch.fault.code == first[0]
    assert latch.age_s >= 0

"""The simulated device behaves as a context on a card: ownership, waiting, faults on order."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from engine.device.host import HostDevice
from engine.device.orders import FaultBoard
from engine.errors import DeviceError, OutOfMemory
from engine.messages import Inject


def double(x: np.ndarray) -> np.ndarray:
    return x * 2


@pytest.fixture
def board() -> FaultBoard:
    return FaultBoard()


@pytest.fixture
def device(board: FaultBoard) -> HostDevice:
    return HostDevice("cpu:0", 0, 3, board)


def test_residency_is_read_from_the_buffer_whichever_device_is_asked() -> None:
    """Rules 3, 4: the owner of the memory answers, not the device that is asked."""
    first, second = HostDevice("cpu:0", 0, 1), HostDevice("cpu:1", 1, 1)
    buffer = second.upload(np.ones((4, 4), np.float32))

    assert first.locate(buffer) == second.residency
    assert first.locate(buffer[2:, 1:]) == second.residency, "a view lives where its buffer lives"
    assert first.residency != second.residency


def test_host_memory_lives_in_no_context() -> None:
    """Rule 3: a plain array is nobody's, and so is a buffer that was given back."""
    device = HostDevice("cpu:0", 0, 1)
    buffer = device.empty((8,), np.float32)
    device.free(buffer)

    held = [device.empty((n * 64,), np.float32) for n in range(1, 9)]
    plain = [np.ones(n * 64, np.float32) for n in range(1, 9)]
    assert [device.locate(array) for array in plain] == [None] * 8, "wherever between ours it lies"
    assert [device.locate(array) for array in held] == [device.residency] * 8
    assert device.locate(buffer) is None


def test_the_result_of_a_launch_is_found_however_many_launches_follow() -> None:
    """Rule 3: rows that a kernel made have an owner as long as they live."""
    device = HostDevice("cpu:0", 0, 1)
    rows = device.launch("double", double, device.zeros((4,), np.float32))
    assert device.locate(rows) == device.residency
    for _ in range(5_000):
        device.launch("double", double, rows)

    assert device.locate(rows[1:3]) == device.residency


def test_memory_of_a_dead_buffer_is_nobodys() -> None:
    """R105: the allocator hands addresses out again, so an entry goes with its buffer."""
    device = HostDevice("cpu:0", 0, 1)
    for _ in range(50):
        buffer = device.empty((1 << 16,), np.float32)
        address = buffer.__array_interface__["data"][0]
        del buffer
        plain = np.empty((1 << 16,), np.float32)
        if plain.__array_interface__["data"][0] == address:
            break
    else:
        pytest.fail("the allocator never reused an address, so nothing was tested")

    assert device.locate(plain) is None


def test_the_ledger_counts_live_buffers_and_a_second_free_does_nothing() -> None:
    """R51, rule 86: count and bytes come back to the level before."""
    device = HostDevice("cpu:0", 0, 1)
    kept = device.zeros((16,), np.float32)
    given = device.zeros((4, 4), np.float64)
    assert device.allocations == (2, 16 * 4 + 16 * 8)

    device.free(given)
    device.free(given)
    device.free(device.empty((0, 4), np.float32))
    assert device.allocations == (1, 64)

    del kept
    gc.collect()
    assert device.allocations == (0, 0)


@pytest.mark.parametrize("fault", ["sticky", "returned"])
def test_a_sticky_fault_fails_every_later_call_with_the_same_code(
    device: HostDevice, board: FaultBoard, fault: str
) -> None:
    """R76, rule 88: raised or returned, it leaves the same wrapper as the same error, for ever."""
    held = device.zeros((4,), np.float32)
    board.order(Inject(fault=fault, where="step", code=716))  # type: ignore[arg-type]
    calls = [
        lambda: device.launch("double", double, held),
        lambda: device.upload(np.ones(2)),
        lambda: device.download(held),
        lambda: device.free(held),
        lambda: device.locate(held),
        lambda: device.empty((2,), np.float32),
        device.synchronize,
    ]
    with board.during("step"):
        for _ in range(2):
            for call in calls:
                with pytest.raises(DeviceError) as failed:
                    call()
                assert (failed.value.code, failed.value.device) == (716, "cpu:0")
    assert not device.canary()
    assert device.failure is not None
    assert device.failure.code == 716


def test_a_fault_of_one_context_leaves_the_other_alone(board: FaultBoard) -> None:
    """R107: stage 1 is lost, stage 0 still answers."""
    first, second = HostDevice("cpu:0", 0, 1, board), HostDevice("cpu:1", 1, 1, board)
    board.order(Inject(fault="sticky", where="now", stage=1))

    assert first.canary()
    assert not second.canary()


def test_an_isolated_failure_happens_once(device: HostDevice, board: FaultBoard) -> None:
    """R76: the next call works again."""
    board.order(Inject(fault="isolated", where="step", code=1))
    with board.during("step"):
        with pytest.raises(DeviceError, match="code 1"):
            device.synchronize()
        device.synchronize()
    assert device.canary()


def test_an_order_waits_for_its_kind_of_call(device: HostDevice, board: FaultBoard) -> None:
    """Rule 120: an order for the tower does not strike a step, and strikes once."""
    board.order(Inject(fault="isolated", where="tower"))
    with board.during("step"):
        device.synchronize()
        with board.during("tower"), pytest.raises(DeviceError):
            device.synchronize()
        with board.during("tower"):
            device.synchronize()
    assert board.struck == 1
    assert not board.armed


def test_no_room_on_order_is_no_device_error(device: HostDevice, board: FaultBoard) -> None:
    """Rule 89: the next allocation fails as out of memory, and only that one."""
    board.order(Inject(fault="out_of_memory", where="alloc"))
    device.synchronize()
    with pytest.raises(OutOfMemory, match="cpu:0"):
        device.zeros((4,), np.float32)
    assert device.zeros((4,), np.float32).shape == (4,)


def test_a_real_shortage_of_memory_is_out_of_memory_too() -> None:
    """Rule 89: the host's own refusal has the same type."""
    with pytest.raises(OutOfMemory):
        HostDevice("cpu:0", 0, 1).empty((1 << 50,), np.float32)


def test_a_hang_can_be_seen_from_another_thread_while_it_lasts(
    device: HostDevice, board: FaultBoard
) -> None:
    """R86, R90: `waiting_s` grows during the call, and the interpreter lock is free."""
    board.order(Inject(fault="hang", where="step", seconds=0.2))
    entered = threading.Event()

    def loop() -> None:
        with board.during("step"):
            entered.set()
            device.synchronize()

    thread = threading.Thread(target=loop)
    thread.start()
    entered.wait()
    seen = 0.0
    while thread.is_alive():
        seen = max(seen, device.waiting_s)
    thread.join()
    assert seen > 0.1
    assert device.waiting_s == 0.0
    device.synchronize()  # a hang that ended leaves a healthy context


def test_a_nan_on_order_lands_in_the_next_rows_of_the_tower(
    device: HostDevice, board: FaultBoard
) -> None:
    """Rule 120: the text layers do not see it."""
    board.order(Inject(fault="nan_image", where="tower"))
    ones = device.upload(np.ones(4, np.float32))
    with board.during("step"):
        assert np.isfinite(device.launch("double", double, ones)).all()
    with board.during("tower"):
        device.synchronize()  # no rows: it waits for the next call that has some
        assert np.isnan(device.launch("double", double, ones)[0])
        assert np.isfinite(device.launch("double", double, ones)).all()


def test_an_order_for_a_stage_that_is_not_there_is_refused(board: FaultBoard) -> None:
    """Rule 120: nothing is kept for later by mistake."""
    HostDevice("cpu:0", 0, 1, board)
    for stage in (4, -1):
        with pytest.raises(IndexError):
            board.order(Inject(fault="sticky", stage=stage))
    assert not board.armed

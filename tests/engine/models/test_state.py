"""States take exactly the bytes of the plan, all or none, and refuse a step before it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.cache.budget import page_bytes, slot_bytes
from engine.device.device import Array
from engine.device.host import HostDevice
from engine.errors import CapacityExceeded, ConfigRefused, OutOfMemory, RowsMissing, StateReleased
from engine.models.registry import describe
from engine.models.state import LatentState, make_states
from engine.spec import Latent, ModelSpec
from tests.fakes.decoder import Decoder, a_device, rows_of

FOLDER = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny"
SIZES = {"slots": 3, "pages": 5, "page_tokens": 16, "capacity": 64}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return describe(FOLDER)


def test_what_is_charged_is_what_is_taken(spec: ModelSpec) -> None:
    """R2: to the byte, for a stage of any layers."""
    for layers in (range(6), range(2, 3), range(3, 6), range(1)):
        device = a_device()
        states = make_states(spec, layers, device, **SIZES)
        part = spec.layers[layers.start : layers.stop]
        want = 5 * page_bytes(part, 16) + 3 * slot_bytes(part)
        assert device.allocations[1] == want
        for state in states:
            state.free()
            state.free()
        assert device.allocations == (0, 0)


class SmallDevice(HostDevice):
    """Has no room for more than so many buffers, and keeps each until it is given back."""

    def __init__(self, room: int) -> None:
        super().__init__("cpu:0", 0, 0, None)
        self.room = room
        self.kept: list[Array] = []

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        if self.allocations[0] >= self.room:
            raise OutOfMemory(f"{self.name} has no room for {shape}.")
        self.kept.append(super().empty(shape, dtype))
        return self.kept[-1]


@pytest.mark.parametrize("room", range(18))
def test_allocation_is_all_or_nothing(spec: ModelSpec, room: int) -> None:
    """R4: whichever buffer cannot be had, the ledger is as before."""
    device = SmallDevice(room)
    with pytest.raises(OutOfMemory):
        make_states(spec, range(6), device, **SIZES)
    assert device.allocations == (0, 0)


def test_all_buffers_of_the_states_are_counted(spec: ModelSpec) -> None:
    """The control of the test above: with room for 18 buffers nothing is refused."""
    device = SmallDevice(18)
    states = make_states(spec, range(6), device, **SIZES)
    assert device.allocations[0] == 18
    assert len(states) == 6


def test_a_geometry_that_does_not_fit_the_pages_is_refused(spec: ModelSpec) -> None:
    """R7: before the first allocation."""
    latent = spec.layers[2].mixer
    assert isinstance(latent, Latent)
    odd = dataclasses.replace(latent.indexer, pool=5, top_tokens=20)
    layer = dataclasses.replace(spec.layers[2], mixer=dataclasses.replace(latent, indexer=odd))
    device = a_device()
    with pytest.raises(ConfigRefused, match="index_kpool"):
        make_states(dataclasses.replace(spec, layers=(layer,)), range(1), device, **SIZES)
    assert device.allocations == (0, 0)


def test_a_refused_step_moves_no_cursor_of_any_sequence(spec: ModelSpec) -> None:
    """R26, R27: every sequence of a step is asked before one of them moves."""
    (state,) = make_states(spec, range(2, 3), a_device(), **SIZES)
    assert isinstance(state, LatentState)
    for slot in range(3):
        state.begin(slot)
        state.cursor(slot).advance(10)
    for segments, error in (
        ([(8, 1), (11, 1)], RowsMissing),
        ([(8, 1), (9, 60)], CapacityExceeded),
    ):
        with pytest.raises(error, match="slot 1, layer 2"):
            state.begin_step(rows_of(segments))
        assert [len(state.cursor(slot)) for slot in range(3)] == [10, 10, 10]
    state.begin_step(rows_of([(8, 1), (9, 3)]))
    assert [len(state.cursor(slot)) for slot in range(3)] == [8, 9, 10]


def test_a_slot_without_a_sequence_is_refused(spec: ModelSpec) -> None:
    """R59: before the first sequence, and behind the last one."""
    (state,) = make_states(spec, range(2, 3), a_device(), **SIZES)
    assert isinstance(state, LatentState)
    state.release(0)
    with pytest.raises(StateReleased, match="slot 0"):
        state.begin_step(rows_of([(0, 1)]))
    state.begin(0)
    state.begin_step(rows_of([(0, 1)]))
    state.release(0)
    state.release(0)
    with pytest.raises(StateReleased, match="slot 0"):
        state.begin_step(rows_of([(0, 1)]))


def test_an_over_long_step_writes_nothing() -> None:
    """R26: the room check of all rows comes before any launch of that layer writes."""
    decoder = Decoder(FOLDER, slots=1, context=32, page_tokens=16)
    decoder.begin(0)
    decoder.prefill(0, list(range(30)), 64)
    state = decoder.states[2]
    assert isinstance(state, LatentState)
    before = [
        array.copy()
        for array in (state.latents.pages, state.index.keys, state.index.valid, state.index.pooled)
    ]
    with pytest.raises(CapacityExceeded, match="--max-context"):
        decoder.step([(0, [1, 2, 3])])
    after = (state.latents.pages, state.index.keys, state.index.valid, state.index.pooled)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert len(state.cursor(0)) == 30


def test_a_step_that_failed_half_way_leaves_the_next_sequence_unharmed() -> None:
    """R29: a failure between layers ends one sequence; its slot serves the next one right."""
    decoder = Decoder(FOLDER, slots=1, context=64, page_tokens=16)
    want, rows = decoder.greedy(0, list(range(20)), 4)
    decoder.begin(0)
    decoder.residual(decoder.batch([(0, list(range(7)))]), 4)  # ended behind layer 3 of 6
    got, again = decoder.greedy(0, list(range(20)), 4)
    assert got == want
    np.testing.assert_array_equal(np.array(rows), np.array(again))


def test_pool_keys_of_restored_rows_are_made_before_they_are_needed() -> None:
    """R16, R25: a snapshot holds no pool keys; the next step makes them from the rows."""
    decoder = Decoder(FOLDER, slots=2, context=64, page_tokens=16)
    prompt = list(range(3, 44))
    decoder.begin(0)
    want = decoder.prefill(0, prompt, [37, 64])
    decoder.begin(0)
    decoder.prefill(0, prompt[:37], 64)
    for state in decoder.states:
        if isinstance(state, LatentState):
            cursor = state.cursor(0)
            blob = state.index.snapshot(cursor, decoder.table[0])
            state.index.pooled[:] = np.nan
            cursor.rewind_to(0)
            state.index.restore(cursor, decoder.table[0], blob)
    got = decoder.step([(0, prompt[37:])])
    np.testing.assert_array_equal(got, want)

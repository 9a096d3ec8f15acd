"""Pages and slots have one owner each."""

from __future__ import annotations

import random

import pytest

from engine.cache.pages import PageId, PagePool, SlotPool, pages_for
from engine.errors import OutOfMemory


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 64) == pages


def test_reserved_pages_stay_with_the_caller() -> None:
    pool = PagePool(4, 64)

    with pool.reserve(3) as held:
        pass

    assert len(set(held)) == 3
    assert pool.free == 1


def test_a_block_that_fails_gives_its_pages_back() -> None:
    pool = PagePool(4, 64)

    with pytest.raises(ZeroDivisionError), pool.reserve(3):
        _ = 1 // 0

    assert pool.free == 4


def test_too_many_pages_are_refused_and_nothing_is_handed_out() -> None:
    pool = PagePool(4, 64)

    with (
        pytest.raises(OutOfMemory, match="5 pages of 64 tokens are wanted and 4 of 4"),
        pool.reserve(5),
    ):
        pass

    assert pool.free == 4


def test_a_page_that_is_not_out_cannot_come_back() -> None:
    pool = PagePool(4, 64)
    with pool.reserve(1) as held:
        pass
    pool.release(held)

    with pytest.raises(AssertionError, match="was not out"):
        pool.release(held)
    with pytest.raises(AssertionError, match="was not out"):
        pool.release([PageId(3)])

    assert pool.free == 4


def test_pages_that_came_back_go_out_before_untouched_ones() -> None:
    """So that the memory in use is what was needed at most, not all there is."""
    pool = PagePool(1_000, 64)
    touched: set[int] = set()

    for _ in range(100):
        with pool.reserve(7) as held:
            touched |= set(held)
        pool.release(held)

    assert touched == set(range(7))


def test_pages_never_have_two_owners() -> None:
    draw = random.Random(7)
    pool = PagePool(50, 16)
    owners: list[tuple[PageId, ...]] = []

    for _ in range(2_000):
        if owners and draw.random() < 0.5:
            pool.release(owners.pop(draw.randrange(len(owners))))
        elif pool.free:
            with pool.reserve(draw.randint(1, pool.free)) as held:
                owners.append(held)
        out = [page for held in owners for page in held]
        assert len(out) == len(set(out)) == pool.total - pool.free


def test_slots_run_out_and_come_back() -> None:
    pool = SlotPool(2)
    first, second = pool.take(), pool.take()

    with pytest.raises(OutOfMemory, match="none of 2 is free"):
        pool.take()

    pool.release(first)
    assert pool.take() == first
    pool.release(second)
    with pytest.raises(AssertionError, match="was not out"):
        pool.release(second)

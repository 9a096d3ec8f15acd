"""From a plan to arrays: geometry, page table, last tokens, image windows."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import CapacityExceeded, ShapeMismatch
from engine.messages import RequestId, Sampling
from engine.models.overlay import Overlay
from engine.pipeline.intake import Intake
from engine.scheduler.plan import Draw, StepPlan, Work
from tests.fakes.asks import a_picture
from tests.fakes.pipeline import FakeBuilder, a_plan_of_caches

DRAW = Draw(sampling=Sampling(), choice=0, position=1)


def work(
    slot: int,
    start: int,
    *,
    tokens: tuple[int, ...] | None = None,
    pages: tuple[int, ...] = (0,),
    draws: bool = True,
    fresh: bool = False,
) -> Work:
    return Work(
        request=RequestId(f"r{slot}"),
        slot=slot,
        start=start,
        count=1 if tokens is None else len(tokens),
        tokens=tokens,
        pages=pages,
        draw=DRAW if draws else None,
        fresh=fresh,
    )


def a_plan(*parts: Work) -> StepPlan:
    return StepPlan(number=1, work=parts)


def an_intake() -> Intake:
    return Intake(a_plan_of_caches(slots=4, pages=40, context=160))


def test_a_step_with_one_over_long_sequence_is_refused_as_a_whole() -> None:
    """R28: before the first sequence is shown its pages; the last row of the capacity is fine."""
    intake = an_intake()
    pages = tuple(range(10))
    with pytest.raises(CapacityExceeded, match=r"r1: rows up to 161 .* 160 at most"):
        intake.batch(a_plan(work(0, 5, pages=pages), work(1, 160, pages=pages)), {})
    batch = intake.batch(a_plan(work(1, 159, pages=pages)), {})
    assert batch.rows.context.tolist() == [159]


def test_decode_rows_read_the_token_that_their_slot_drew_last() -> None:
    intake = an_intake()
    intake.note(np.array([2, 0]), np.array([50, 60]))

    batch = intake.batch(a_plan(work(0, 5), work(2, 9)), {})

    assert batch.ids.tolist() == [60, 50]
    assert batch.rows.decode == 2
    assert batch.rows.starts.tolist() == [0, 1, 2]
    assert batch.rows.context.tolist() == [5, 9]
    assert batch.rows.slots.tolist() == [0, 2]
    assert batch.outputs.tolist() == [0, 1]


def test_prompt_rows_stand_behind_decode_rows() -> None:
    intake = an_intake()
    intake.note(np.array([3]), np.array([70]))

    batch = intake.batch(
        a_plan(
            work(3, 20, pages=(7, 9)),
            work(1, 0, tokens=(4, 5, 6), pages=(1,), draws=False, fresh=True),
            work(0, 2, tokens=(8, 9), pages=(2,)),
        ),
        {},
    )

    assert batch.ids.tolist() == [70, 4, 5, 6, 8, 9]
    assert batch.rows.decode == 1
    assert batch.rows.starts.tolist() == [0, 1, 4, 6]
    assert batch.rows.fresh.tolist() == [False, True, False]
    assert batch.rows.table.tolist() == [[7, 9], [1, 0], [2, 0]]
    assert batch.outputs.tolist() == [0, 5]
    for array in (batch.ids, batch.rows.starts, batch.rows.context, batch.rows.slots):
        assert array.dtype == np.int32
    assert batch.rows.table.dtype == np.int32


def test_the_page_table_follows_growth_and_a_new_owner() -> None:
    intake = an_intake()
    intake.batch(a_plan(work(0, 1, pages=(3, 4))), {})
    intake.batch(a_plan(work(0, 32, pages=(3, 4, 5))), {})

    shorter = intake.batch(a_plan(work(0, 0, tokens=(1,), pages=(9,), fresh=True)), {})
    both = intake.batch(a_plan(work(0, 1, pages=(9,)), work(1, 40, pages=(6, 7, 8))), {})

    assert shorter.rows.table.tolist() == [[9]]
    assert both.rows.table.tolist() == [[9, 0, 0], [6, 7, 8]]


@pytest.mark.parametrize(
    ("start", "pages"), [(16, (1,)), (0, tuple(range(11)))], ids=["too few", "too many"]
)
def test_pages_that_do_not_fit_are_refused(start: int, pages: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match="slot 0 has"):
        an_intake().batch(a_plan(work(0, start, pages=pages)), {})


def test_a_row_without_a_token_never_becomes_an_index() -> None:
    """Rule 85: -1 would read another row of the embedding."""
    intake = an_intake()
    intake.note(np.array([1]), np.array([-1]))

    assert intake.batch(a_plan(work(1, 3)), {}).ids.tolist() == [0]


def test_each_chunk_gets_the_window_of_its_rows() -> None:
    """Rules 7 and 8: rebased to the chunk, and nothing where it has no image row."""
    overlay: Overlay = FakeBuilder().build([a_picture(5, 4)])
    plan = a_plan(work(0, 3), work(1, 6, tokens=(1, 2, 3, 4), pages=(0,)))

    batch = an_intake().batch(plan, {RequestId("r1"): overlay, RequestId("r0"): overlay})
    later = an_intake().batch(
        a_plan(work(1, 9, tokens=(1, 2), pages=(0,))), {RequestId("r1"): overlay}
    )

    ((first, window),) = batch.overlays
    assert first == 1
    assert window.spans == ((0, 1, 3),)
    assert window.rows is overlay.rows
    assert later.overlays == ()

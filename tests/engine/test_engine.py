"""The loop: what a request gets, whatever happens beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from engine.errors import CapacityExceeded, ContextLost, DeviceError, OutOfMemory, RequestFault
from engine.messages import Event, Failed, Finished, Generate, Inject, RequestId, Token
from engine.scheduler.plan import StepPlan, Work
from tests.fakes.asks import a_picture, an_ask, an_ask_with_pictures, plain_ids
from tests.fakes.pipeline import (
    IMAGE,
    SPEC,
    FakeBuilder,
    Loop,
    a_plan_of_caches,
    answer,
    next_token,
)

LATE = pytest.mark.parametrize("steps_in_flight", [1, 2])


def tokens(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


def ending(events: list[Event]) -> Event:
    """The one event that ends a request; it is the last one and the only one of its kind."""
    ends = [event for event in events if not isinstance(event, Token)]
    assert ends == events[-1:], ends
    return ends[0]


def assert_right(loop: Loop, ask: Generate) -> None:
    """The request got the tokens and the ending of an undisturbed run, once."""
    events = loop.of(ask.request)
    want, reason = answer(ask, loop.caches.context)
    end = ending(events)
    assert tokens(events) == want
    assert isinstance(end, Finished)
    assert end.reason == reason
    assert end.stop_id == (want[-1] if reason == "stop" else None)


def reason_of(loop: Loop) -> str:
    """Why the worker is lost; empty when it is not."""
    return loop.latch.fault.reason if loop.latch.fault else ""


class Raising:
    """Raises the given errors, one at each step that `where` picks, and nothing after that."""

    def __init__(self, *errors: Exception, where: Callable[[StepPlan], bool] = bool) -> None:
        self.errors = list(errors)
        self.where = where

    def __call__(self, plan: StepPlan) -> None:
        if self.errors and self.where(plan):
            raise self.errors.pop(0)


def has(name: str) -> Callable[[StepPlan], bool]:
    return lambda plan: any(work.request == name for work in plan.work)


@LATE
def test_a_request_gets_its_tokens_and_one_ending(steps_in_flight: int) -> None:
    loop = Loop(steps_in_flight=steps_in_flight)
    ask = an_ask(prompt=100, max_tokens=20)

    loop.engine.add(ask)
    loop.run()

    assert_right(loop, ask)
    loop.assert_all_given_back()


@LATE
def test_a_stop_id_ends_the_answer_and_wastes_one_row_at_most(steps_in_flight: int) -> None:
    """gpu.md 4: a sequence that turns out to be finished has one wasted row."""
    loop = Loop(steps_in_flight=steps_in_flight)
    whole, _ = answer(an_ask(max_tokens=30), 512)
    ask = an_ask(max_tokens=30, stop_ids=(whole[6],))

    loop.engine.add(ask)
    loop.run()

    assert_right(loop, ask)
    assert len(tokens(loop.events)) == whole.index(whole[6]) + 1
    rows = sum(plan.total_tokens for plan in loop.pipeline.plans)
    needed = 8 + len(tokens(loop.events)) - 1
    assert rows - needed == steps_in_flight - 1
    loop.assert_all_given_back()


def test_the_bound_wastes_no_row_when_results_come_late() -> None:
    """The end by `length` is known from counts, so nothing is planned behind it."""
    loop = Loop(steps_in_flight=2)

    loop.engine.add(an_ask(max_tokens=5))
    loop.run()

    assert sum(plan.total_tokens for plan in loop.pipeline.plans) == 8 + 4


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    """O35."""
    loop = Loop()
    whole, _ = answer(an_ask(), 512)

    loop.engine.add(an_ask(max_tokens=4, stop_ids=(whole[3],)))
    loop.run()

    assert ending(loop.events) == an_ending_like(loop.events[-1], "stop", whole[3])


def an_ending_like(event: Event, reason: str, stop_id: int | None) -> Finished:
    """The same ending with the reason and stop id that are wanted; its times are its own."""
    assert isinstance(event, Finished)
    return Finished(
        event.request,
        reason="stop" if reason == "stop" else "length",
        stop_id=stop_id,
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
    )


@LATE
def test_stop_ids_are_held_off_until_min_tokens(steps_in_flight: int) -> None:
    """O25."""
    loop = Loop(steps_in_flight=steps_in_flight)
    every = tuple(range(2, 80))
    ask = an_ask(max_tokens=12, min_tokens=6, stop_ids=every)

    loop.engine.add(ask)
    loop.run()

    assert_right(loop, ask)
    made = tokens(loop.events)
    assert len(made) >= 7
    assert not set(made[:6]) & set(every)


@pytest.mark.parametrize(("below", "want"), [(1, 1), (2, 2), (3, 3), (10, 10)])
@LATE
def test_a_sequence_ends_with_length_at_the_end_of_the_context(
    below: int, want: int, steps_in_flight: int
) -> None:
    """R44, R72: a prompt of C - n gets n tokens; no row at C - 1 or above is ever written."""
    loop = Loop(caches=a_plan_of_caches(context=64), steps_in_flight=steps_in_flight)

    loop.engine.add(an_ask(prompt=64 - below, max_tokens=1_000))
    loop.run()

    assert len(tokens(loop.events)) == want
    assert ending(loop.events) == an_ending_like(loop.events[-1], "length", None)


def test_a_prompt_of_the_whole_context_never_reaches_the_device() -> None:
    """R26, R69."""
    loop = Loop(caches=a_plan_of_caches(context=64))

    loop.engine.add(an_ask(prompt=64))
    loop.run()

    end = ending(loop.events)
    assert isinstance(end, Failed)
    assert end.code == "context_length_exceeded"
    assert "64 tokens and at most 63" in end.message
    assert not loop.pipeline.plans
    assert loop.engine.stats().counters["capacity_refusals_total"] == 1


@pytest.mark.parametrize("step_tokens", [16, 17, 64, 1_024])
@LATE
def test_chunks_do_not_change_the_answer(step_tokens: int, steps_in_flight: int) -> None:
    loop = Loop(step_tokens=step_tokens, steps_in_flight=steps_in_flight)
    asks = [an_ask(f"r{i}", prompt=37 * (i + 1), max_tokens=9, seed=i) for i in range(4)]

    for ask in asks:
        loop.engine.add(ask)
    loop.run()

    for ask in asks:
        assert_right(loop, ask)
    loop.assert_all_given_back()


@LATE
def test_a_full_pool_sends_the_youngest_back_and_no_token_is_sent_twice(
    steps_in_flight: int,
) -> None:
    """Rule 89: it goes on as prompt + emitted tokens."""
    loop = Loop(caches=a_plan_of_caches(pages=24), steps_in_flight=steps_in_flight)
    asks = [an_ask(f"r{i}", prompt=20, max_tokens=220, seed=i) for i in range(3)]

    for ask in asks:
        loop.engine.add(ask)
    loop.run()

    assert loop.engine.stats().counters["preemptions_total"] > 0
    for ask in asks:
        assert_right(loop, ask)
    loop.assert_all_given_back()


@LATE
def test_a_request_that_outgrows_the_whole_pool_is_overloaded(steps_in_flight: int) -> None:
    """Rule 89: still no room; the token that was on its way is taken in first."""
    loop = Loop(caches=a_plan_of_caches(pages=4), steps_in_flight=steps_in_flight)

    loop.engine.add(an_ask(prompt=20, max_tokens=200))
    loop.run()

    end = ending(loop.events)
    assert isinstance(end, Failed)
    assert end.code == "overloaded"
    assert len(tokens(loop.events)) == 64 - 20 + 1
    loop.assert_all_given_back()


def test_a_replayed_request_continues_behind_its_emitted_tokens() -> None:
    """Rule 98: no gap, no repeat."""
    loop = Loop()
    ask = an_ask(prompt=30, max_tokens=10)
    whole, _ = answer(ask, 512)

    loop.engine.add(an_ask(prompt=30, max_tokens=10, emitted=tuple(whole[:4])))
    loop.run()

    assert tokens(loop.events) == whole[4:]


def test_a_replay_that_had_all_its_tokens_only_ends() -> None:
    loop = Loop()
    whole, _ = answer(an_ask(max_tokens=4), 512)

    loop.engine.add(an_ask(max_tokens=4, emitted=tuple(whole)))
    loop.run()

    assert isinstance(ending(loop.events), Finished)
    assert not tokens(loop.events)
    assert not loop.pipeline.plans
    loop.assert_all_given_back()


# -- leaving, pausing -----------------------------------------------------------------------------


@LATE
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_abort_gives_everything_back_and_says_nothing(after: int, steps_in_flight: int) -> None:
    """Rule 86: while queued, in prefill and in decode; the neighbour does not notice."""
    loop = Loop(steps_in_flight=steps_in_flight)
    stays = an_ask("stays", max_tokens=30)
    loop.engine.add(stays)
    loop.engine.add(an_ask("leaves", prompt=200, max_tokens=100))
    for _ in range(after):
        loop.step()
    so_far = len(loop.of("leaves"))

    loop.engine.abort(RequestId("leaves"))
    loop.engine.abort(RequestId("leaves"))
    loop.run()

    assert len(loop.of("leaves")) == so_far
    assert_right(loop, stays)
    loop.assert_all_given_back()


def test_an_aborted_request_in_the_queue_never_reaches_the_device() -> None:
    """Rule 86."""
    loop = Loop(caches=a_plan_of_caches(slots=1))
    loop.engine.add(an_ask("runs"))
    loop.engine.add(an_ask("queued"))
    loop.step()

    loop.engine.abort(RequestId("queued"))
    loop.run()

    assert not any(plan.tokens_of(RequestId("queued")) for plan in loop.pipeline.plans)


@LATE
def test_a_paused_request_gets_no_row_and_then_goes_on(steps_in_flight: int) -> None:
    """O85: others are not slowed."""
    loop = Loop(steps_in_flight=steps_in_flight)
    slow, quick = an_ask("slow", max_tokens=20), an_ask("quick", max_tokens=40)
    loop.engine.add(slow)
    loop.engine.add(quick)
    for _ in range(5):
        loop.step()

    loop.engine.pause(RequestId("slow"))
    planned = len(loop.pipeline.plans)
    loop.run()

    assert_right(loop, quick)
    assert not any(p.tokens_of(RequestId("slow")) for p in loop.pipeline.plans[planned:])
    loop.engine.resume(RequestId("slow"))
    loop.run()
    assert_right(loop, slow)
    loop.assert_all_given_back()


def test_a_loop_with_nothing_but_paused_requests_is_not_busy() -> None:
    loop = Loop()
    loop.engine.add(an_ask(max_tokens=100))
    loop.step()

    loop.engine.pause(RequestId("a"))
    loop.run(turns=5)

    assert not loop.engine.busy
    assert loop.engine.stats().running == 1


# -- the queue ------------------------------------------------------------------------------------


def test_a_full_queue_is_overloaded_at_once() -> None:
    """O63, R75: as many as there are slots, and the limit behind them."""
    loop = Loop(caches=a_plan_of_caches(slots=2), queue_limit=3)

    for i in range(6):
        loop.engine.add(an_ask(f"r{i}"))
    loop.step()

    failed = [event for event in loop.events if isinstance(event, Failed)]
    assert [(e.request, e.code) for e in failed] == [("r5", "overloaded")]


def test_a_request_that_waits_too_long_is_overloaded() -> None:
    """O63: 60 s; what has begun is not ended by it."""
    loop = Loop(caches=a_plan_of_caches(slots=1))
    runs = an_ask("runs", max_tokens=40)
    loop.engine.add(runs)
    loop.engine.add(an_ask("waits"))
    loop.step()

    loop.clock.now += 60.0
    loop.step()

    end = ending(loop.of("waits"))
    assert isinstance(end, Failed)
    assert end.code == "overloaded"
    loop.run()
    assert_right(loop, runs)


def test_a_sequence_that_was_sent_back_does_not_time_out() -> None:
    """O63 bounds the wait for a first slot; rule 89: a stream that has begun goes on."""
    loop = Loop(caches=a_plan_of_caches(pages=13))
    old = an_ask("old", prompt=4, max_tokens=180)
    young = an_ask("young", prompt=20, max_tokens=40)
    loop.engine.add(old)
    while len(tokens(loop.events)) < 130:  # 134 rows; at 144 it needs the page that is not there
        loop.step()
    loop.engine.add(young)
    for _ in range(15):
        loop.step()
    stats = loop.engine.stats()
    assert (stats.counters["preemptions_total"], stats.waiting) == (1, 1)

    loop.clock.now += 61.0
    loop.run()

    assert_right(loop, old)
    assert_right(loop, young)


def test_a_paused_request_at_the_head_of_the_queue_lets_others_pass() -> None:
    """O85: others are not slowed."""
    loop = Loop(caches=a_plan_of_caches(slots=1))
    first, second = an_ask("first"), an_ask("second")
    loop.engine.add(first)
    loop.engine.add(second)
    loop.engine.pause(RequestId("first"))
    loop.run()

    assert_right(loop, second)
    assert not loop.of("first")
    loop.engine.resume(RequestId("first"))
    loop.run()
    assert_right(loop, first)


def test_an_id_that_is_here_already_is_refused_and_the_first_is_not_touched() -> None:
    loop = Loop()
    ask = an_ask()
    loop.engine.add(ask)

    with pytest.raises(RequestFault, match="a is here already"):
        loop.engine.add(an_ask(prompt=3))

    loop.run()
    assert_right(loop, ask)


# -- pictures -------------------------------------------------------------------------------------


@LATE
def test_pictures_are_encoded_at_the_first_prompt_rows_and_land_at_their_places(
    steps_in_flight: int,
) -> None:
    """Rules 7, 26, 75: every placeholder has its row, in one chunk or in many."""
    loop = Loop(builder=FakeBuilder(), step_tokens=16, steps_in_flight=steps_in_flight)
    ask = an_ask_with_pictures("p", 11, 7, 1)

    loop.engine.add(ask)
    loop.run()

    assert_right(loop, ask)
    assert len(loop.builder_calls()) == 1
    want = [(ask.request, i) for i, token in enumerate(ask.prompt) if token == IMAGE]
    assert loop.pipeline.seen_images == want


def test_a_text_request_runs_no_tower() -> None:
    """Rule 82."""
    loop = Loop(builder=FakeBuilder())

    loop.engine.add(an_ask())
    loop.run()

    assert not loop.builder_calls()


def test_one_request_at_most_is_encoded_in_a_step() -> None:
    """Running answers wait for one tower run, not for sixteen."""
    loop = Loop(builder=FakeBuilder(), caches=a_plan_of_caches(slots=8), step_tokens=256)
    asks = [an_ask_with_pictures(f"p{i}", 5, 4) for i in range(5)]
    stream = an_ask("stream", max_tokens=40)
    loop.engine.add(stream)
    loop.step()
    for ask in asks:
        loop.engine.add(ask)

    for expected in range(1, 6):
        before = len(tokens(loop.of("stream")))
        loop.step()
        assert len(loop.builder_calls()) == expected
        assert len(tokens(loop.of("stream"))) == before + 1

    loop.run()
    for ask in (*asks, stream):
        assert_right(loop, ask)


@LATE
def test_image_rows_live_until_the_result_of_the_last_prompt_chunk(steps_in_flight: int) -> None:
    """Rule 61: never dropped earlier, and no later than the end of prefill."""
    builder = FakeBuilder()
    loop = Loop(builder=builder, step_tokens=16, steps_in_flight=steps_in_flight)
    loop.engine.add(an_ask_with_pictures("p", 20, text=10, max_tokens=20))
    loop.step()

    while not tokens(loop.events):
        assert builder.device.allocations[0] == 1
        loop.step()

    assert builder.device.allocations[0] == 0


@pytest.mark.parametrize(
    ("prompt", "pictures"),
    [
        ((5, IMAGE, IMAGE, 6), ()),
        ((5, 6, 7), (a_picture(1, 2),)),
        ((5, IMAGE, IMAGE, 6), (a_picture(1, 3),)),
        ((5, IMAGE, IMAGE, 6), (a_picture(2, 2),)),
        ((5, IMAGE, 6, IMAGE, 7), (a_picture(1, 1),)),
        ((5, IMAGE, IMAGE, 6), (a_picture(1, 1), a_picture(2, 1))),
    ],
    ids=["no picture", "no run", "too short", "moved", "a run too many", "two in one run"],
)
def test_placeholders_and_pictures_out_of_step_fail_before_the_tower(
    prompt: tuple[int, ...], pictures: tuple[object, ...]
) -> None:
    """Rules 28 and 35."""
    loop = Loop(builder=FakeBuilder())

    loop.engine.add(an_ask(prompt=prompt, pictures=pictures))  # type: ignore[arg-type]
    loop.run()

    end = ending(loop.events)
    assert isinstance(end, Failed)
    assert end.code == "internal_error"
    assert not loop.builder_calls()
    assert not loop.pipeline.plans


def test_a_picture_that_cannot_be_encoded_ends_its_request_alone() -> None:
    """Rules 23 and 88: our own words reach the client."""
    builder = FakeBuilder(errors=[RequestFault("the image rows were not finite")])
    loop = Loop(builder=builder)
    peer, after = an_ask("peer", max_tokens=20), an_ask_with_pictures("after", 6)
    loop.engine.add(peer)
    loop.engine.add(an_ask_with_pictures("p", 4))
    loop.engine.add(after)
    loop.run()

    assert loop.of("p") == [
        Failed(RequestId("p"), "internal_error", "the image rows were not finite")
    ]
    assert_right(loop, peer)
    assert_right(loop, after)
    loop.assert_all_given_back()


def test_no_memory_for_pictures_is_tried_again_and_then_overloaded() -> None:
    """Rules 22 and 89: one retry at once, then three times through the queue."""
    few = FakeBuilder(errors=[OutOfMemory("full")] * 7)
    many = FakeBuilder(errors=[OutOfMemory("full")] * 8)
    served, refused = Loop(builder=few), Loop(builder=many)
    ask = an_ask_with_pictures("p", 4)

    for loop in (served, refused):
        loop.engine.add(ask)
        loop.run()

    assert_right(served, ask)
    end = ending(refused.events)
    assert isinstance(end, Failed)
    assert end.code == "overloaded"
    assert served.judge.probes_passed == refused.judge.probes_passed == 0
    refused.assert_all_given_back()


@LATE
def test_a_sequence_sent_back_in_its_prompt_is_encoded_again(steps_in_flight: int) -> None:
    """Its image rows went with its pages, and what was encoded once may be encoded again."""
    loop = Loop(
        builder=FakeBuilder(),
        caches=a_plan_of_caches(pages=12),
        step_tokens=16,
        steps_in_flight=steps_in_flight,
    )
    old = an_ask("old", prompt=4, max_tokens=180)
    young = an_ask_with_pictures("young", 20, text=10, max_tokens=8)
    loop.engine.add(old)
    while len(tokens(loop.events)) < 139:  # 143 rows: the next page is two rows away
        loop.step()
    loop.engine.add(young)
    loop.run()

    assert loop.engine.stats().counters["preemptions_total"] == 1
    assert len(loop.builder_calls()) == 2
    assert_right(loop, old)
    assert_right(loop, young)
    loop.assert_all_given_back()


# -- failures -------------------------------------------------------------------------------------


@LATE
@pytest.mark.parametrize("late_errors", [False, True])
def test_a_failed_step_ends_its_requests_and_the_next_one_on_the_slot_is_right(
    steps_in_flight: int, late_errors: bool
) -> None:
    """R29, rules 88 and 90: what failed is not used again."""
    loop = Loop(
        on_step=Raising(CapacityExceeded("layer 7 of 11"), where=has("bad")),
        late_errors=late_errors,
        steps_in_flight=steps_in_flight,
    )
    waits = an_ask("waits", max_tokens=12)
    loop.engine.add(an_ask("bad"))
    loop.step()
    loop.engine.add(waits)
    loop.run()

    end = ending(loop.of("bad"))
    assert isinstance(end, Failed)
    assert end.code == "internal_error"
    assert "layer" not in end.message  # rule 92
    assert_right(loop, waits)
    assert loop.judge.probes_passed == 1
    loop.assert_all_given_back()


def test_a_lost_stage_leaves_the_loop_as_an_exception() -> None:
    """R76, R82: the latch is set and nothing ends with `stop` or `length`."""
    loop = Loop()
    loop.pipeline.on_step = lambda _: loop.device.synchronize()
    loop.engine.add(an_ask())
    loop.step()

    loop.board.order(Inject(fault="sticky", where="now", code=700))
    with pytest.raises(ContextLost):
        loop.run()

    assert loop.latch.fault is not None
    assert loop.latch.fault.code == 700
    assert len(tokens(loop.events)) == 1
    assert len(loop.events) == 1


def test_a_lost_stage_in_the_tower_leaves_the_loop_as_well() -> None:
    """R82, R106."""
    builder = FakeBuilder(errors=[DeviceError("conv", code=700, device="cpu:0")])
    loop = Loop(builder=builder)
    loop.board.order(Inject(fault="sticky", where="now", code=700))
    loop.engine.add(an_ask_with_pictures("p", 4))

    with pytest.raises(ContextLost):
        loop.run()

    assert loop.latch.fault is not None
    assert "tower" in loop.latch.fault.reason


def test_an_isolated_device_error_ends_one_step_only() -> None:
    """R76: the probe passes, so it is the request's."""
    loop = Loop(on_step=Raising(DeviceError("gemm", code=716, device="cpu:0"), where=has("bad")))
    good = an_ask("good", max_tokens=5)
    loop.engine.add(an_ask("bad"))
    loop.run()
    loop.engine.add(good)
    loop.run()

    assert isinstance(ending(loop.of("bad")), Failed)
    assert_right(loop, good)
    assert loop.latch.fault is None


@LATE
def test_a_step_without_memory_is_tried_once_more_when_nothing_was_written(
    steps_in_flight: int,
) -> None:
    """Rule 89."""
    loop = Loop(on_step=Raising(OutOfMemory("full")), steps_in_flight=steps_in_flight)
    ask = an_ask()
    loop.engine.add(ask)
    loop.run()

    assert_right(loop, ask)
    assert loop.engine.stats().counters["out_of_memory_total"] == 0
    assert loop.judge.probes_passed == 0


@LATE
@pytest.mark.parametrize(("failures", "served"), [(3, True), (4, False)])
def test_a_step_that_wrote_goes_through_the_queue_three_times(
    failures: int, served: bool, steps_in_flight: int
) -> None:
    """Rule 89: prompt + emitted, no gap, no repeat; then overloaded."""
    loop = Loop(steps_in_flight=steps_in_flight)
    left = [failures]

    def fail(plan: StepPlan) -> None:
        loop.pipeline.wrote = True
        if left[0] and plan.number > 4:
            left[0] -= 1
            raise OutOfMemory("full")

    loop.pipeline.on_step = fail
    ask = an_ask(max_tokens=20)
    loop.engine.add(ask)
    loop.run()

    if served:
        assert_right(loop, ask)
    else:
        end = ending(loop.events)
        assert isinstance(end, Failed)
        assert end.code == "overloaded"
    assert loop.judge.probes_passed == 0
    loop.assert_all_given_back()


def test_a_late_want_of_memory_counts_once_for_the_steps_that_were_on_their_way() -> None:
    """Rule 89: the second of two steps belongs to an occupation that has ended already."""
    loop = Loop(steps_in_flight=2, late_errors=True)

    def fail(plan: StepPlan) -> None:
        if plan.number in (5, 6, 9, 10, 13, 14):
            raise OutOfMemory("full")

    loop.pipeline.on_step = fail
    ask = an_ask(max_tokens=20)
    loop.engine.add(ask)
    loop.run()

    assert loop.engine.stats().counters["out_of_memory_total"] == 6
    assert_right(loop, ask)


@LATE
def test_a_row_that_is_not_finite_ends_its_request_alone(steps_in_flight: int) -> None:
    """O86."""
    loop = Loop(steps_in_flight=steps_in_flight)
    loop.pipeline.bad_rows = lambda work: work.request == "bad" and work.start > 10
    good = an_ask("good", max_tokens=20)
    loop.engine.add(an_ask("bad", max_tokens=20))
    loop.engine.add(good)
    loop.run()

    end = ending(loop.of("bad"))
    assert isinstance(end, Failed)
    assert end.code == "internal_error"
    assert_right(loop, good)
    assert loop.engine.stats().counters["bad_rows_total"] == 1
    loop.assert_all_given_back()


def test_three_steps_in_a_row_with_bad_rows_are_the_workers_fault() -> None:
    """O86: two are not, and a good step between begins anew."""
    loop = Loop()
    bad = {"b0", "b1", "b3", "b4", "b5"}
    loop.pipeline.bad_rows = lambda work: work.request in bad
    for name in ("b0", "b1", "good2", "b3", "b4"):
        loop.engine.add(an_ask(name, max_tokens=1))
        loop.run()
    assert not reason_of(loop)

    loop.engine.add(an_ask("b5", max_tokens=1))
    with pytest.raises(ContextLost):
        loop.run()

    assert "not finite" in reason_of(loop)


@pytest.mark.parametrize("wrong", [-1, 96, 1_000, IMAGE, 91])
@LATE
def test_a_drawn_id_that_must_not_be_ends_its_request(wrong: int, steps_in_flight: int) -> None:
    """Rules 30 and 85: padding, vision ids and what lies outside, never clamped."""
    loop = Loop(steps_in_flight=steps_in_flight)

    def spoil(work: Work) -> int | None:
        return wrong if work.request == "bad" else None

    loop.pipeline.spoiled = spoil
    good = an_ask("good")
    loop.engine.add(an_ask("bad"))
    loop.engine.add(good)
    loop.run()

    assert isinstance(ending(loop.of("bad")), Failed)
    assert not tokens(loop.of("bad"))
    assert_right(loop, good)
    loop.assert_all_given_back()


def test_a_replay_with_a_placeholder_in_its_answer_is_refused() -> None:
    """Rule 30: it would be fed as text."""
    loop = Loop(builder=FakeBuilder())

    loop.engine.add(an_ask(emitted=(5, IMAGE, 6)))
    loop.run()

    assert isinstance(ending(loop.events), Failed)
    assert not loop.pipeline.plans


@pytest.mark.parametrize("prompt", [(), (5, -1), (5, 96)])
def test_a_prompt_with_ids_outside_the_vocabulary_is_refused(prompt: tuple[int, ...]) -> None:
    """Rule 85."""
    loop = Loop()

    loop.engine.add(an_ask(prompt=prompt))
    loop.run()

    assert isinstance(ending(loop.events), Failed)
    assert not loop.pipeline.plans


# -- nothing grows --------------------------------------------------------------------------------


def _stops(loop: Loop, name: str) -> None:
    first = next_token(plain_ids(name, 8))
    loop.engine.add(an_ask(name, stop_ids=(first,)))
    loop.run()


def _reaches_its_bound(loop: Loop, name: str) -> None:
    loop.engine.add(an_ask_with_pictures(name, 5))
    loop.run()


def _leaves(loop: Loop, name: str) -> None:
    loop.engine.add(an_ask_with_pictures(name, 5, max_tokens=50))
    for _ in range(3):
        loop.step()
    loop.engine.abort(RequestId(name))
    loop.run()


def _leaves_the_queue(loop: Loop, name: str) -> None:
    loop.engine.add(an_ask(name))
    loop.engine.abort(RequestId(name))
    loop.run()


def _fails(loop: Loop, name: str) -> None:
    loop.pipeline.on_step = Raising(CapacityExceeded("on order"))
    loop.engine.add(an_ask(name))
    loop.run()


def _has_bad_rows(loop: Loop, name: str) -> None:
    loop.pipeline.bad_rows = lambda work: work.request == name
    loop.engine.add(an_ask(name))
    loop.run()
    loop.engine.add(an_ask("good"))
    loop.run()


def _times_out(loop: Loop, name: str) -> None:
    for i in range(loop.caches.slots):
        loop.engine.add(an_ask(f"{name}-{i}", max_tokens=4))
    loop.step()
    loop.engine.add(an_ask(name))
    loop.clock.now += 61.0
    loop.run()


@LATE
@pytest.mark.parametrize(
    "way",
    [
        _stops,
        _reaches_its_bound,
        _leaves,
        _leaves_the_queue,
        _fails,
        _has_bad_rows,
        _times_out,
    ],
)
def test_a_hundred_requests_leave_nothing_behind(
    way: Callable[[Loop, str], None], steps_in_flight: int
) -> None:
    """R61: counts equal the start exactly, for each way to end."""
    builder = FakeBuilder()
    loop = Loop(builder=builder, steps_in_flight=steps_in_flight)
    for i in range(100):
        way(loop, f"r{i}")
        loop.assert_all_given_back()

    gc.collect()
    assert builder.device.allocations == (0, 0)
    assert loop.device.allocations == (0, 0)


# -- the self-test --------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", [None, FakeBuilder()])
def test_the_self_test_makes_one_token_through_every_part(builder: FakeBuilder | None) -> None:
    """Rule 109, R98."""
    loop = Loop(builder=builder)

    token = loop.engine.self_test()

    assert 0 <= token < SPEC.usable_vocab
    assert len(loop.pipeline.seen_images) == (2 if builder else 0)
    assert not loop.engine.step()
    loop.assert_all_given_back()


def test_a_self_test_without_a_legal_token_fails() -> None:
    loop = Loop()
    loop.pipeline.bad_rows = lambda _: True

    with pytest.raises(Exception, match="the self-test ended in"):
        loop.engine.self_test()


def test_progress_is_a_result_on_the_host_and_not_a_turn_of_the_loop() -> None:
    """Rule 79, R86."""
    loop = Loop(steps_in_flight=2)
    loop.engine.add(an_ask())
    loop.step()  # one step is on its way, no result is here
    before = loop.engine.progress_at

    loop.clock.now += 5.0
    assert loop.engine.stats().progress_age_s >= 5.0
    loop.step()

    assert loop.engine.progress_at > before + 5.0
    loop.run()
    after = loop.engine.progress_at
    loop.clock.now += 5.0
    loop.step()
    assert loop.engine.progress_at == after


def test_the_stats_say_what_is_held() -> None:
    loop = Loop(caches=a_plan_of_caches(slots=2, pages=20))
    for i in range(3):
        loop.engine.add(an_ask(f"r{i}", prompt=40, max_tokens=24))
    loop.step()

    stats = loop.engine.stats()

    assert (stats.running, stats.waiting, stats.waits_for) == (2, 1, "no_slot")
    assert (stats.slots_free, stats.slots_total) == (0, 2)
    assert (stats.pages_free, stats.pages_total) == (20 - 2 * 4, 20)
    assert stats.counters["prompt_rows_total"] == 64

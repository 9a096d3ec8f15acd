"""Random days of the loop, with a slow and obvious model beside it, equal after every step."""

from __future__ import annotations

import gc
import random
from collections import Counter

import pytest

from engine.cache.pages import PageId
from engine.errors import CapacityExceeded, OutOfMemory
from engine.messages import Failed, Finished, Generate, RequestId, Token
from engine.scheduler.plan import StepPlan
from engine.scheduler.request import Running
from tests.fakes.asks import an_ask, an_ask_with_pictures, plain_ids
from tests.fakes.pipeline import FakeBuilder, Loop, a_plan_of_caches, answer

TURNS = 400
REUSE = {"snapshots": 7, "reuse_bytes": 25}


class Day:
    """Arrivals, departures, pauses and failures, drawn from a seed."""

    def __init__(self, seed: int, steps_in_flight: int, reuse: bool) -> None:
        self.draw = random.Random(seed)
        self.reuse = reuse
        self.builder = FakeBuilder()
        self.loop = Loop(
            caches=a_plan_of_caches(
                slots=self.draw.choice([1, 2, 5, 9]),
                pages=self.draw.choice([14, 20, 33, 90]),
                context=self.draw.choice([128, 192]),
                **(REUSE if reuse else {}),
            ),
            builder=self.builder,
            steps_in_flight=steps_in_flight,
            on_step=self._trouble,
            late_errors=self.draw.random() < 0.5,
            step_tokens=self.draw.choice([16, 24, 64, 256]),
            queue_limit=6,
        )
        self.asks: dict[RequestId, Generate] = {}
        self.gone: set[RequestId] = set()  # aborted: no ending is due
        self.paused: set[RequestId] = set()
        self.hit: set[RequestId] = set()  # was in a step that failed on order
        self.calm = False  # no more arrivals and no more trouble

    def _trouble(self, plan: StepPlan) -> None:
        check_writes(self, plan)
        if self.calm or self.draw.random() > 0.02:
            return
        if self.draw.random() < 0.5:
            self.loop.pipeline.wrote = True
            raise OutOfMemory("on order")
        self.hit |= {work.request for work in plan.work}
        raise CapacityExceeded("on order")

    def turn(self) -> None:
        """Something happens, and the loop makes one step."""
        here = sorted(self.asks.keys() - self.gone - self.over())
        if not self.calm and self.draw.random() < 0.3:
            self._arrive()
        if here and self.draw.random() < 0.03:
            self._leave(self.draw.choice(here))
        if here and not self.calm and self.draw.random() < 0.05:
            name = self.draw.choice(here)
            self.loop.engine.pause(name)
            self.paused.add(name)
        if self.paused and (self.calm or self.draw.random() < 0.1):
            name = self.draw.choice(sorted(self.paused))
            self.loop.engine.resume(name)
            self.paused.discard(name)
        self.loop.step()

    def _arrive(self) -> None:
        draw, name = self.draw, f"r{len(self.asks)}"
        longest = self.loop.caches.context - 1
        if self.reuse and self.asks and draw.random() < 0.6:
            ask = self._like_an_earlier_one(name)
        elif draw.random() < 0.25:
            sizes = [draw.randint(1, 12) for _ in range(draw.randint(1, 3))]
            ask = an_ask_with_pictures(name, *sizes, text=3, max_tokens=draw.randint(1, 40))
        else:
            ask = an_ask(
                name,
                prompt=draw.choice([1, 2, 15, 16, 17, draw.randint(1, longest)]),
                max_tokens=draw.randint(1, 60),
                seed=draw.randrange(1_000),
                min_tokens=draw.choice([0, 0, 3]),
                stop_ids=tuple(draw.sample(range(90), draw.choice([0, 1, 4]))),
            )
        if draw.random() < 0.1:  # a replay (rule 98)
            whole, _ = answer(ask, self.loop.caches.context)
            sent = tuple(whole[: draw.randint(1, len(whole))])
            ask = an_ask(
                name,
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                seed=ask.sampling.seed,
                min_tokens=ask.min_tokens,
                stop_ids=ask.stop_ids,
                pictures=ask.pictures,
                emitted=sent,
            )
        self.asks[ask.request] = ask
        self.loop.engine.add(ask)

    def _like_an_earlier_one(self, name: str) -> Generate:
        """The same beginning, with another end or with the answer and a new question behind it."""
        draw = self.draw
        earlier = self.asks[draw.choice(sorted(self.asks))]
        cut = draw.randint(1, len(earlier.prompt))
        cut = max([cut, *(p.position + p.tokens for p in earlier.pictures)])
        prompt = earlier.prompt[:cut] + plain_ids(name, draw.randint(0, 20))
        if draw.random() < 0.3:
            prompt = earlier.prompt + tuple(answer(earlier, self.loop.caches.context)[0])
        return an_ask(
            name,
            prompt=prompt[: self.loop.caches.context - 1],
            max_tokens=draw.randint(1, 40),
            pictures=earlier.pictures,
            cache_salt=earlier.cache_salt or draw.choice(["", "", "other"]),
        )

    def _leave(self, name: RequestId) -> None:
        self.loop.engine.abort(name)
        self.gone.add(name)
        self.paused.discard(name)

    def over(self) -> set[RequestId]:
        return {e.request for e in self.loop.events if not isinstance(e, Token)}


def check_tokens(day: Day) -> None:
    """Every request has a prefix of the right answer, and at most one ending, at its place."""
    for name, ask in day.asks.items():
        events = day.loop.of(name)
        want, reason = answer(ask, day.loop.caches.context)
        want = want[len(ask.emitted) :]
        got = [event.id for event in events if isinstance(event, Token)]
        assert got == want[: len(got)], name
        ends = [event for event in events if not isinstance(event, Token)]
        assert ends == events[len(got) :], name
        assert len(ends) <= 1, name
        match ends:
            case [Finished(reason=said)]:
                assert (got, said) == (want, reason), name
            case [Failed(code="internal_error")]:
                assert name in day.hit
            case [Failed(code=code)]:
                assert code == "overloaded"
                assert name not in day.gone


def check_holdings(day: Day) -> None:
    """Pages and slots add up, and nothing that a step on its way uses is free."""
    scheduler = day.loop.engine._scheduler
    prefixes = scheduler.prefixes
    held: list[int] = []
    slots: list[int] = []
    for request in scheduler._running:
        assert isinstance(request.phase, Running)
        held += request.phase.pages
        slots.append(request.phase.slot)
    for leaving in scheduler._holdings._leaving:
        held += leaving.pages
        slots.append(leaving.slot)
    kept = [block.page for block in prefixes._blocks.values()]
    owners = Counter([*held, *kept])
    assert day.reuse or max(owners.values(), default=1) == 1, "a page has two owners"
    assert all(scheduler.pages.owners(PageId(page)) == n for page, n in owners.items())
    assert len(slots) == len(set(slots)), "a slot has two owners"
    assert len(owners) + scheduler.pages.free == scheduler.pages.total
    assert len(slots) + scheduler.slots.free == scheduler.slots.total
    for plan, _ in day.loop.pipeline.on_their_way:
        assert {page for work in plan.work for page in work.pages} <= set(held)
        assert {work.slot for work in plan.work} <= set(slots)
    check_reuse(day, held)


def check_reuse(day: Day, held: list[int]) -> None:
    """What is kept is within its bounds, found from its beginning, and idle when nobody uses it."""
    prefixes = day.loop.engine._scheduler.prefixes
    blocks = prefixes._blocks.values()
    assert len({block.page for block in blocks}) == len(blocks)
    assert prefixes.size <= max(day.loop.caches.reuse_bytes, 0)
    assert all(block.parent is None or block.parent.alive for block in blocks)
    assert {b.key for b in blocks if not b.users} == prefixes._idle.keys()
    assert all(block.page in held for block in blocks if block.users)


def check_writes(day: Day, plan: StepPlan) -> None:
    """Rule 38: no step writes into a page that anybody else can read."""
    pages = day.loop.engine._scheduler.pages
    size = day.loop.caches.page_tokens
    for work in plan.work:
        for page in work.pages[work.start // size : (work.start + work.count - 1) // size + 1]:
            assert pages.owners(PageId(page)) == 1


@pytest.mark.parametrize("reuse", [False, True], ids=["alone", "reuse"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_every_request_gets_its_own_tokens_and_one_ending(
    seed: int, steps_in_flight: int, reuse: bool
) -> None:
    """R29, R44, R61, R66, R74, rules 38, 86 to 90: whatever arrives, leaves, pauses and fails."""
    day = Day(seed, steps_in_flight, reuse)

    for turn in range(TURNS):
        day.turn()
        check_holdings(day)
        if turn % 20 == 0:
            check_tokens(day)
    day.calm = True
    for _ in range(3_000):
        if not day.loop.engine.busy and not day.paused:
            break
        day.turn()
        check_holdings(day)

    check_tokens(day)
    assert day.over() | day.gone == day.asks.keys()
    day.loop.assert_all_given_back()
    prefixes = day.loop.engine._scheduler.prefixes
    assert prefixes.snapshots.out == sum(
        block.snapshot is not None for block in prefixes._blocks.values()
    )
    hits = day.loop.engine.stats().counters["prefix_cache_hits_total"]
    few = day.loop.caches.slots == 1  # so few are served that none may begin like another
    assert (hits > 0) == reuse or few
    prefixes.clear()
    assert (prefixes.size, prefixes.snapshots.out, prefixes.idle) == (0, 0, 0)
    assert day.loop.engine._scheduler.pages.free == day.loop.caches.pages
    gc.collect()  # an error on order keeps its frames until then
    assert day.builder.device.allocations == (0, 0)
    finished = [event for event in day.loop.events if isinstance(event, Finished)]
    assert len(finished) >= 10

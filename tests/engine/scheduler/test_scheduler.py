"""Who gets how many rows in a step, and who waits (rules 74 and 80, R74)."""

from __future__ import annotations

from engine.cache.budget import CachePlan
from engine.config import EngineConfig
from engine.messages import RequestId
from engine.scheduler.plan import Drawn, StepPlan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.shares import PROMPT_ROWS_BESIDE_ANSWERS, PROMPT_TURN_S
from tests.fakes.asks import an_ask, an_ask_with_pictures
from tests.fakes.pipeline import SPEC, Clock, a_plan_of_caches


class Driver:
    """A scheduler whose every step succeeds and draws token 7."""

    def __init__(self, *, step_tokens: int = 64, caches: CachePlan | None = None) -> None:
        self.caches = caches or a_plan_of_caches(slots=64, pages=1_000)
        self.clock = Clock()
        config = EngineConfig(
            model="fake", max_sequences=self.caches.slots, step_tokens=step_tokens, page_tokens=16
        )
        self.scheduler = Scheduler(config, SPEC, self.caches, self.clock)

    def answer(self, name: str, prompt: int = 8, max_tokens: int = 400) -> RequestId:
        """Add a request and run it until its prompt is done."""
        ask = an_ask(name, prompt=prompt, max_tokens=max_tokens)
        self.scheduler.add(ask)
        while not self.step().tokens_of(ask.request):
            pass
        while self.scheduler.in_prompt(ask.request):
            self.step()
        return ask.request

    def prompt(self, name: str, tokens: int) -> RequestId:
        """Add a request and plan nothing yet."""
        ask = an_ask(name, prompt=tokens)
        self.scheduler.add(ask)
        return ask.request

    def plan(self) -> StepPlan:
        self.clock.now += 0.01
        self.scheduler.admit()
        while request := self.scheduler.starting():
            self.scheduler.pictures_ready(request)
            break
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        drawn = {w.request: Drawn(7, -1.0) for w in plan.work if w.draw is not None}
        self.scheduler.commit(StepResult(number=plan.number, drawn=drawn))
        return plan


def test_a_long_prompt_does_not_stop_a_running_answer() -> None:
    driver = Driver(step_tokens=64)
    answer = driver.answer("answer")
    prompt = driver.prompt("prompt", 400)

    plan = driver.plan()

    assert plan.tokens_of(answer) == 1
    assert plan.tokens_of(prompt) == 63
    assert plan.total_tokens == 64


def test_answers_come_first_in_a_plan_and_have_one_row() -> None:
    """`Rows.decode` counts the leading sequences with one row."""
    driver = Driver(step_tokens=16)
    prompt = driver.prompt("prompt", 500)
    driver.step()
    answers = [driver.answer(f"a{i}", prompt=4) for i in range(2)]

    plan = driver.plan()

    assert [w.request for w in plan.work] == [*answers, prompt]
    assert [w.count for w in plan.work] == [1, 1, 14]


def test_prompt_rows_beside_answers_are_bounded() -> None:
    """The next token of everybody waits for the prompt chunk."""
    driver = Driver(step_tokens=1_024)
    driver.answer("answer")
    prompt = driver.prompt("prompt", 500)

    assert driver.plan().tokens_of(prompt) == PROMPT_ROWS_BESIDE_ANSWERS


def test_a_prompt_alone_gets_the_whole_step() -> None:
    """Rule 74."""
    driver = Driver(step_tokens=256)
    prompt = driver.prompt("prompt", 500)

    assert [driver.step().tokens_of(prompt) for _ in range(2)] == [256, 244]


def test_a_prompt_gets_rows_when_answers_alone_would_fill_the_step() -> None:
    """Rule 80: a waiting prompt is never starved, and no answer is either."""
    driver = Driver(step_tokens=16)
    answers = [driver.answer(f"a{i}") for i in range(40)]
    prompt = driver.prompt("prompt", 200)

    plans = [driver.step() for _ in range(10)]

    assert all(plan.tokens_of(prompt) == 4 for plan in plans)
    assert all(plan.total_tokens == 16 for plan in plans)
    for answer in answers:
        turns = [plan.tokens_of(answer) for plan in plans]
        assert all(any(turns[i : i + 5]) for i in range(6)), turns  # 40 answers, 12 rows a step


def test_prompts_are_computed_in_order_of_arrival() -> None:
    driver = Driver(step_tokens=64)
    first, second, third = (driver.prompt(name, 50) for name in ("a", "b", "c"))

    plan = driver.plan()

    assert [plan.tokens_of(r) for r in (first, second, third)] == [50, 14, 0]


def test_a_short_prompt_behind_a_long_one_gets_its_turn() -> None:
    """Rule 80: at least every 0.05 s of scheduler time."""
    driver = Driver(step_tokens=16)
    driver.prompt("long", 500)
    driver.step()
    short = driver.prompt("short", 8)

    waited = 0.0
    while not driver.step().tokens_of(short):
        waited += 0.01
        assert waited <= PROMPT_TURN_S + 0.01


def test_one_picture_request_at_most_starts_in_a_step() -> None:
    driver = Driver(step_tokens=256)
    driver.answer("answer")
    asks = [an_ask_with_pictures(f"p{i}", 6) for i in range(3)]
    for ask in asks:
        driver.scheduler.add(ask)
    text = driver.prompt("text", 20)

    plan = driver.plan()

    assert [plan.tokens_of(ask.request) > 0 for ask in asks] == [True, False, False]
    assert plan.tokens_of(text) == 20


def test_nothing_is_planned_for_a_request_whose_pictures_are_not_ready() -> None:
    driver = Driver()
    ask = an_ask_with_pictures("p", 6)
    driver.scheduler.add(ask)
    driver.scheduler.admit()

    assert driver.scheduler.plan() is None
    request = driver.scheduler.starting()
    assert request is not None
    driver.scheduler.pictures_ready(request)
    plan = driver.scheduler.plan()
    assert plan is not None
    assert plan.tokens_of(ask.request) == len(ask.prompt)


def test_nobody_overtakes_in_the_queue() -> None:
    """R74: a short prompt would fit, and waits behind the long one all the same."""
    driver = Driver(caches=a_plan_of_caches(slots=4, pages=20))
    driver.answer("answer", prompt=100, max_tokens=20)
    long = driver.prompt("long", 250)
    short = driver.prompt("short", 4)

    driver.scheduler.admit()

    assert driver.scheduler.waits_for == "no_pages"
    assert driver.scheduler.waiting == 2
    while driver.scheduler.waiting:
        plan = driver.step()
        assert not plan.tokens_of(short) or plan.tokens_of(long) or driver.scheduler.waiting == 0


def test_admission_reserves_prompt_and_a_first_part_of_the_answer() -> None:
    """R74: prompt + min(max_tokens, watermark)."""
    driver = Driver()
    total = driver.scheduler.pages.total

    driver.scheduler.add(an_ask("short", prompt=20, max_tokens=12))
    driver.scheduler.admit()
    after_short = driver.scheduler.pages.free
    driver.scheduler.add(an_ask("long", prompt=20, max_tokens=480))
    driver.scheduler.admit()

    assert total - after_short == 2
    assert after_short - driver.scheduler.pages.free == (20 + 128 + 15) // 16


def test_a_request_above_the_pool_is_admitted_when_nothing_else_runs() -> None:
    """R74: rather than queueing it for ever."""
    driver = Driver(caches=a_plan_of_caches(slots=4, pages=8))
    other = driver.answer("other", prompt=8, max_tokens=8)
    big = an_ask("big", prompt=100, max_tokens=100).request
    driver.scheduler.add(an_ask("big", prompt=100, max_tokens=100))

    driver.scheduler.admit()
    assert driver.scheduler.waiting == 1
    driver.scheduler.abort(other)
    driver.scheduler.admit()

    assert driver.scheduler.waiting == 0
    assert driver.plan().tokens_of(big) > 0


def test_a_plan_may_come_before_the_result_of_the_one_before_it() -> None:
    """gpu.md 4: a decode row names its slot, never the value of the last token."""
    driver = Driver()
    driver.scheduler.add(an_ask(prompt=8, max_tokens=4))
    first, second, third = driver.plan(), driver.plan(), driver.plan()

    assert first.work[0].tokens is not None
    assert [(p.work[0].start, p.work[0].count, p.work[0].tokens) for p in (second, third)] == [
        (8, 1, None),
        (9, 1, None),
    ]
    assert [p.work[0].draw.position for p in (first, second, third) if p.work[0].draw] == [8, 9, 10]
    assert first.work[0].fresh
    assert not second.work[0].fresh

"""Known beginnings in the loop: what is reused, what is told of it, and what never is."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import CapacityExceeded, RequestFault
from engine.messages import Failed, Finished, Generate, RequestId, Token
from engine.scheduler.plan import StepPlan
from tests.engine.test_engine import LATE, Raising, assert_right, has
from tests.fakes.asks import a_picture, an_ask, an_ask_with_pictures, plain_ids
from tests.fakes.pipeline import IMAGE, FakeBuilder, Loop, a_plan_of_caches, answer

PROMPT = plain_ids("a long beginning", 100)


def a_loop(
    *,
    slots: int = 4,
    pages: int = 64,
    steps_in_flight: int = 1,
    builder: FakeBuilder | None = None,
    snapshots: int = 16,
) -> Loop:
    caches = a_plan_of_caches(
        slots=slots, pages=pages, snapshots=snapshots, snapshot_tokens=32, reuse_bytes=60
    )
    return Loop(caches=caches, steps_in_flight=steps_in_flight, builder=builder)


def run(loop: Loop, *asks: Generate) -> None:
    for ask in asks:
        loop.engine.add(ask)
    loop.run()


def rows(loop: Loop, name: str) -> int:
    """Rows that were computed for a request."""
    return sum(plan.tokens_of(RequestId(name)) for plan in loop.pipeline.plans)


def cached(loop: Loop, name: str) -> int:
    """As the ending tells it; the first token told the same, the others nothing."""
    *tokens, end = loop.of(name)
    assert isinstance(end, Finished)
    told = [token.cached_tokens for token in tokens if isinstance(token, Token)]
    assert told == [end.cached_tokens] + [0] * (len(told) - 1)
    return end.cached_tokens


@LATE
def test_the_same_prompt_again_computes_its_last_page_only(steps_in_flight: int) -> None:
    """R26: never all of it, for a token comes from a row that is computed."""
    loop = a_loop(steps_in_flight=steps_in_flight)
    first, again = an_ask("a", prompt=PROMPT[:96]), an_ask("b", prompt=PROMPT[:96])

    run(loop, first)
    run(loop, again)

    assert_right(loop, first)
    assert_right(loop, again)
    assert (cached(loop, "a"), cached(loop, "b")) == (0, 80)
    assert rows(loop, "b") == 16 + 7
    loop.assert_all_given_back()


def test_another_end_of_a_known_beginning_leaves_a_snapshot_where_they_part() -> None:
    """The first goes on from the grid, the next ones from the very page."""
    loop = a_loop()
    asks = [an_ask(n, prompt=PROMPT[:56] + plain_ids(n, 60)) for n in "abc"]

    for ask in asks:
        run(loop, ask)
        assert_right(loop, ask)

    assert [cached(loop, n) for n in "abc"] == [0, 32, 48]


def test_a_conversation_goes_on_behind_its_answer() -> None:
    loop = a_loop()
    first = an_ask("a", prompt=PROMPT, max_tokens=40)
    run(loop, first)
    longer = PROMPT + tuple(answer(first, 512)[0]) + plain_ids("next", 30)

    run(loop, an_ask("b", prompt=longer))
    run(loop, an_ask("c", prompt=longer[:-5] + plain_ids("other", 20)))

    assert_right(loop, an_ask("c", prompt=longer[:-5] + plain_ids("other", 20)))
    assert cached(loop, "b") == 128  # the grid holds in answers as well
    assert cached(loop, "c") == 160


def test_salts_do_not_share() -> None:
    """O25."""
    loop = a_loop()
    salts = {"a": "x", "b": "y", "c": "x", "d": ""}

    for name, salt in salts.items():
        run(loop, an_ask(name, prompt=PROMPT, cache_salt=salt))

    assert [cached(loop, name) for name in salts] == [0, 0, 96, 0]


def with_picture(name: str, digest: str) -> Generate:
    """Text of 40 tokens, a picture of 30 rows, text of 40 tokens; equal ids for equal sizes."""
    ids = PROMPT[:40] + (IMAGE,) * 30 + PROMPT[40:80]
    picture = msgspec.structs.replace(a_picture(40, 30), digest=digest)
    return an_ask(name, prompt=ids, pictures=(picture,))


def test_another_picture_is_never_found_and_the_same_one_needs_no_tower() -> None:
    """Rule 38, O59: reuse ends in front of the first page with rows of another picture."""
    builder = FakeBuilder()
    loop = a_loop(builder=builder)

    for name, digest in (("a", "red"), ("b", "sky"), ("c", "red"), ("d", "sky")):
        run(loop, with_picture(name, digest))

    assert [cached(loop, name) for name in "abcd"] == [0, 32, 96, 96]
    assert len(builder.built) == 2
    assert builder.device.allocations == (0, 0)


def test_only_pictures_behind_the_known_beginning_are_encoded() -> None:
    builder = FakeBuilder()
    loop = a_loop(builder=builder)
    first = an_ask_with_pictures("a", 20, 12, text=20)
    run(loop, first)
    others = []
    for name in "bc":
        last = msgspec.structs.replace(first.pictures[1], digest=name)
        others.append(
            msgspec.structs.replace(
                first, request=RequestId(name), pictures=(first.pictures[0], last)
            )
        )

    run(loop, others[0])
    run(loop, others[1])

    assert_right(loop, others[1])
    assert [cached(loop, name) for name in "bc"] == [32, 48]  # the first picture ends at row 40
    assert builder.built == [first.pictures, others[0].pictures, others[1].pictures[1:]]


def test_a_picture_that_cannot_be_encoded_gives_its_snapshot_back() -> None:
    """The state behind the text was to be loaded by a first step that never came."""
    builder = FakeBuilder()
    loop = a_loop(builder=builder)
    run(loop, with_picture("a", "red"))
    builder.errors.append(RequestFault("on order"))

    run(loop, with_picture("b", "sky"))

    assert isinstance(loop.of("b")[-1], Failed)
    loop.assert_all_given_back()
    prefixes = loop.engine._scheduler.prefixes
    prefixes.clear()
    assert prefixes.snapshots.out == 0


def test_requests_that_run_together_share_as_soon_as_the_prompt_is_computed() -> None:
    """Admission charges only what is new: three of eight pages each would not fit twelve."""
    loop = a_loop(pages=12)
    run(loop, an_ask("a", prompt=PROMPT, max_tokens=4))

    for name in "bcd":
        loop.engine.add(an_ask(name, prompt=PROMPT, max_tokens=20))
    loop.step()

    assert loop.engine.stats().running == 3
    assert [w.load is not None for w in loop.pipeline.plans[-1].work] == [True] * 3
    loop.run()
    for name in "bcd":
        assert_right(loop, an_ask(name, prompt=PROMPT, max_tokens=20))
    loop.assert_all_given_back()


def test_what_is_kept_keeps_nobody_waiting() -> None:
    """Pages of ended requests are free pages: a request that needs all of them gets them."""
    loop = a_loop(pages=16)
    run(loop, an_ask("a", prompt=PROMPT))
    assert loop.engine.stats().pages_free == 16
    big = an_ask("b", prompt=240, max_tokens=16)

    run(loop, big)

    assert_right(loop, big)
    assert loop.engine.stats().counters["preemptions_total"] == 0
    loop.assert_all_given_back()


@LATE
def test_a_request_that_was_sent_back_finds_its_own_rows(steps_in_flight: int) -> None:
    """Rule 89: what it had computed is still there, as far as nobody needed the pages."""
    loop = a_loop(slots=2, pages=24, steps_in_flight=steps_in_flight)
    asks = [an_ask(n, prompt=plain_ids(n, 40), max_tokens=250) for n in "ab"]

    run(loop, *asks)

    for ask in asks:
        assert_right(loop, ask)
    counters = loop.engine.stats().counters
    assert counters["preemptions_total"] >= 1
    assert counters["prefix_cache_hits_total"] >= 64
    assert cached(loop, "b") == 0  # O36: preemption does not change what is told


@LATE
def test_a_request_that_failed_leaves_nothing_to_be_found(steps_in_flight: int) -> None:
    """R66: not its answer, nor its prompt, which others could use while it ran."""
    loop = a_loop(steps_in_flight=steps_in_flight)
    loop.engine.add(an_ask("a", prompt=PROMPT, max_tokens=40))
    while len(loop.of("a")) < 5:
        loop.step()
    assert loop.engine._scheduler.prefixes.blocks == 6

    loop.pipeline.on_step = Raising(CapacityExceeded("on order"), where=has("a"))
    loop.run()

    assert isinstance(loop.of("a")[-1], Failed)
    assert loop.engine._scheduler.prefixes.blocks == 0
    run(loop, an_ask("b", prompt=PROMPT))
    assert cached(loop, "b") == 0
    loop.assert_all_given_back()


def test_an_abort_in_the_middle_of_a_step_leaves_no_half_walk() -> None:
    """Rule 87: what was computed before stays, the walk that was cut off does not enter."""
    loop = a_loop(steps_in_flight=2)
    loop.engine.add(an_ask("a", prompt=PROMPT))
    loop.step()
    loop.step()  # rows of the prompt are on their way
    assert loop.pipeline.on_their_way

    loop.engine.abort(an_ask("a").request)
    loop.run()

    assert loop.engine._scheduler.prefixes.blocks == 0
    assert loop.engine._scheduler.prefixes.snapshots.out == 0
    loop.assert_all_given_back()


def test_a_client_that_left_between_steps_leaves_its_rows() -> None:
    """A stop string ends an answer like that, and its prompt may well come again."""
    loop = a_loop()
    loop.engine.add(an_ask("a", prompt=PROMPT))
    while not loop.of("a"):
        loop.step()

    loop.engine.abort(an_ask("a").request)
    loop.run()
    run(loop, an_ask("b", prompt=PROMPT))

    assert cached(loop, "b") == 96


def test_without_a_place_for_a_snapshot_nothing_breaks() -> None:
    loop = a_loop(snapshots=1)
    asks = [an_ask(n, prompt=PROMPT, max_tokens=30) for n in "abcd"]

    run(loop, *asks)

    for ask in asks:
        assert_right(loop, ask)
    loop.assert_all_given_back()


def test_reuse_switched_off_cuts_no_step_and_looks_nothing_up() -> None:
    loop = Loop(step_tokens=128)
    for name in "ab":
        run(loop, an_ask(name, prompt=PROMPT))

    assert [cached(loop, name) for name in "ab"] == [0, 0]
    prompts: list[StepPlan] = [p for p in loop.pipeline.plans if p.total_tokens > 1]
    assert [plan.total_tokens for plan in prompts] == [100, 100]


@pytest.mark.parametrize("tokens", [16, 17, 33, 64, 65, 100])
def test_at_least_one_row_is_always_computed(tokens: int) -> None:
    """R26: whatever the length of a prompt that is known whole."""
    loop = a_loop()
    for name in "abc":
        run(loop, an_ask(name, prompt=PROMPT[:tokens]))
        assert_right(loop, an_ask(name, prompt=PROMPT[:tokens]))

    assert cached(loop, "c") == (tokens - 1) // 16 * 16

"""Token events become deltas that do not depend on where tokens are cut, with true counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.chat.events import Delta, Done, ReasoningDelta, TextDelta
from app.chat.reasoning import ReasoningMarkers
from app.chat.stops import StopStrings
from app.chat.stream import AnswerPlan, deltas
from app.errors import AnswerFailed
from app.tokens import Tokenizer
from engine.messages import Event, Failed, Finished, FinishReason, RequestId, Token
from tests.app.chat.glimmer import FOLDER, ROWS, THINK, THINK_END, USER

TOKENIZER = Tokenizer.open(FOLDER, rows=ROWS)
BYTE_IDS = {TOKENIZER.bytes_of(i): i for i in range(964) if len(TOKENIZER.bytes_of(i)) == 1}
MARKERS = ReasoningMarkers(THINK, THINK_END)
R = RequestId("r")
anytime = settings(deadline=None)  # a busy machine is no failure


def plan(**changes: Any) -> AnswerPlan:
    changes.setdefault("end_ids", (964, 971, 973))
    return AnswerPlan(tokenizer=TOKENIZER, prompt_tokens=7, image_tokens=3, **changes)


def thinking(**changes: Any) -> AnswerPlan:
    return plan(reasoning=MARKERS, starts_in_reasoning=True, **changes)


class FakeWorker:
    """Emits the tokens of one answer, then its end; knows whether it was closed early."""

    def __init__(self, tokens: Sequence[int], end: Event | None) -> None:
        self.emitted = 0
        self.closed_early = False
        self._tokens = tokens
        self._end = end

    async def events(self) -> AsyncGenerator[Event]:
        try:
            for id_ in self._tokens:
                self.emitted += 1
                yield Token(R, id_)
            if self._end is not None:
                yield self._end
        except GeneratorExit:
            self.closed_early = True
            raise


def finished(reason: FinishReason = "length", stop_id: int | None = None) -> Finished:
    return Finished(R, reason, stop_id=stop_id, cached_tokens=2)


async def gather(worker: FakeWorker, how: AnswerPlan) -> list[Delta]:
    return [delta async for delta in deltas(worker.events(), how)]


def run(tokens: Sequence[int], how: AnswerPlan, end: Event | None = None) -> list[Delta]:
    return asyncio.run(gather(FakeWorker(tokens, end or finished()), how))


def joined(got: Sequence[Delta], kind: type[TextDelta | ReasoningDelta] = TextDelta) -> str:
    return "".join(delta.text for delta in got if isinstance(delta, kind))


def last(got: Sequence[Delta]) -> Done:
    done = got[-1]
    assert isinstance(done, Done)
    assert sum(isinstance(delta, Done) for delta in got) == 1
    return done


def words(*pieces: str) -> list[int]:
    """One token a byte."""
    return [BYTE_IDS[bytes([byte])] for byte in "".join(pieces).encode()]


text = st.text(st.sampled_from("abcSTOP \n<é\U0001f60a"), max_size=30)
stops = st.lists(st.text(st.sampled_from("abSTOP \n"), min_size=1, max_size=5), max_size=4)


def outcome(whole: str, stop_strings: Sequence[str]) -> tuple[str, str | None]:
    """The obvious way: the stop string that is complete first, the longer of two."""
    for end in range(1, len(whole) + 1):
        hits = [s for s in stop_strings if whole[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


@anytime
@given(text, stops, st.data())
def test_a_stop_string_is_cut_exactly_wherever_the_text_is_cut(
    whole: str, stop_strings: list[str], data: st.DataObject
) -> None:
    """O37, B-051, B-052."""
    parser = StopStrings(stop_strings)
    shown = ""
    at = 0
    while at < len(whole):
        size = data.draw(st.integers(1, 5))
        shown += parser.feed(whole[at : at + size])
        at += size
        want, _ = outcome(whole[:at], stop_strings)
        assert want.startswith(shown)  # nothing of a stop string is ever shown
    shown += parser.close()

    # several may end inside one piece, but the first to end is found all the same
    assert (shown, parser.matched) == outcome(whole, stop_strings)


@pytest.mark.parametrize("size", range(1, 9))
def test_a_stop_string_in_one_piece_or_many(size: int) -> None:
    parser = StopStrings(["DEFGHIJ"])
    whole = "ABCDEFGHIJK"

    shown = "".join(parser.feed(whole[i : i + size]) for i in range(0, len(whole), size))

    assert (shown + parser.close(), parser.matched) == ("ABC", "DEFGHIJ")


def test_text_is_held_back_no_longer_than_needed() -> None:
    parser = StopStrings(["STOP"])

    assert [parser.feed(piece) for piece in ("aS", "T", "x", "SSTO")] == ["a", "", "STx", "S"]
    assert parser.close() == "STO"


@anytime
@given(text, text, stops)
def test_a_stream_of_bytes_equals_a_stream_of_tokens(
    thought: str, said: str, stop_strings: list[str]
) -> None:
    """O87: the same text, whichever tokens it came in."""
    how = thinking(stop=tuple(stop_strings))
    small = run([*words(thought), THINK_END, *words(said)], how)
    large = run([*TOKENIZER.encode(thought), THINK_END, *TOKENIZER.encode(said)], how)

    for got in (small, large):
        assert joined(got, ReasoningDelta) == thought
        assert (joined(got), last(got).stop_reason) == outcome(said, stop_strings)
        assert not any("\ufffd" in d.text for d in got if not isinstance(d, Done))


def test_nothing_of_a_stop_string_over_several_tokens_is_shown() -> None:
    """B-051."""
    got = run(words("ABC", "DEF", "G", "HI", "J", "K"), plan(stop=("DEFGHIJ",)))

    assert joined(got) == "ABC"
    assert last(got).finish_reason == "stop"
    assert last(got).stop_reason == "DEFGHIJ"
    assert last(got).usage.completion_tokens == 10


async def test_a_stop_string_ends_the_generation_before_anything_else() -> None:
    """B-052: the worker is told at once, and tokens up to the stop string count."""
    worker = FakeWorker(words("one two three"), finished())

    got = [
        (delta, worker.closed_early) async for delta in deltas(worker.events(), plan(stop=("two",)))
    ]

    assert joined([delta for delta, _ in got]) == "one "
    assert [closed for _, closed in got] == [False] * 4 + [True]
    assert worker.emitted == last([delta for delta, _ in got]).usage.completion_tokens == 7


def test_a_stop_string_at_the_very_start() -> None:
    """B-053."""
    got = run(words("STOP more"), plan(stop=("STOP",)))

    assert len(got) == 1
    assert last(got).finish_reason == "stop"
    assert last(got).usage.completion_tokens == 4


def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    """B-056."""
    got = run(words("ab"), plan(stop=("b",)), finished("length"))

    assert (joined(got), last(got).finish_reason) == ("a", "stop")


def test_held_text_is_shown_when_the_answer_ends_first() -> None:
    got = run(words("aST"), plan(stop=("STOP",)))

    assert (joined(got), last(got).finish_reason) == ("aST", "length")


def test_stop_strings_are_held_off_for_the_first_tokens() -> None:
    """O25 `min_tokens`: the text of those tokens holds no stop string, later text does."""
    got = run(words("xSTOPySTOPz"), plan(stop=("STOP",), min_tokens=5))

    assert joined(got) == "xSTOPy"


@pytest.mark.parametrize("end_id", [964, 971, 973])
def test_the_end_token_is_neither_text_nor_counted(end_id: int) -> None:
    """O36, B-055: every end id of the checkpoint."""
    got = run([*words("Hi"), end_id], plan(), finished("stop", end_id))

    assert joined(got) == "Hi"
    assert last(got) == Done("stop", None, last(got).usage)
    assert last(got).usage.completion_tokens == 2


def test_a_stop_token_id_is_named_and_not_shown() -> None:
    """O25, O35 `stop_reason`."""
    stop_id = words("!")[0]
    got = run([*words("Hi"), stop_id], plan(stop_token_ids=(stop_id,)), finished("stop", stop_id))

    assert joined(got) == "Hi"
    assert (last(got).finish_reason, last(got).stop_reason) == ("stop", stop_id)


def test_ignored_end_tokens_count_and_do_not_show() -> None:
    """O25 `ignore_eos`: benchmarks count on the bound."""
    got = run([*words("a"), USER, *words("b")], plan(end_ids=()))

    assert joined(got) == "ab"
    assert last(got).usage.completion_tokens == 3


def test_thinking_and_answer_are_split_and_counted() -> None:
    """O34, O36: reasoning counts its end marker; the numbers of each delta run along."""
    got = run([*words("hm"), THINK_END, *words("Red"), USER], thinking(), finished("stop", USER))

    assert joined(got, ReasoningDelta) == "hm"
    assert joined(got) == "Red"
    usage = last(got).usage
    assert (usage.prompt_tokens, usage.image_tokens, usage.cached_tokens) == (7, 3, 2)
    assert (usage.completion_tokens, usage.reasoning_tokens) == (6, 3)
    assert [d.completion_tokens for d in got[:-1] if not isinstance(d, Done)] == [1, 2, 4, 5, 6]
    assert [d.reasoning_tokens for d in got[:-1] if not isinstance(d, Done)] == [1, 2, 3, 3, 3]


def test_an_end_of_thinking_at_the_start_never_shows() -> None:
    """Glimmer's first token: no reasoning, one reasoning token."""
    got = run([THINK_END, *words("Hi")], thinking())

    assert [type(delta) for delta in got] == [TextDelta, TextDelta, Done]
    assert last(got).usage.reasoning_tokens == 1


@pytest.mark.parametrize(("end", "id_"), [("length", None), ("stop", USER)])
def test_an_answer_that_ends_while_thinking_is_cut(end: FinishReason, id_: int | None) -> None:
    """O34: content is empty and finish_reason is length, whatever ended it."""
    got = run([*words("hm"), *([id_] if id_ else [])], thinking(), finished(end, id_))

    assert joined(got) == ""
    assert last(got).finish_reason == "length"
    assert last(got).usage.reasoning_tokens == 2


def test_stop_strings_are_not_looked_for_in_thinking() -> None:
    """O34 leaves no other end inside it."""
    got = run([*words("a STOP b"), THINK_END, *words("c STOP d")], thinking(stop=("STOP",)))

    assert joined(got, ReasoningDelta) == "a STOP b"
    assert joined(got) == "c "


def test_markers_never_reach_the_content() -> None:
    """O34: not even when the model writes them into its answer; text that looks alike stays."""
    got = run([THINK_END, *words("a"), THINK, *words("</think>"), THINK_END], thinking())

    assert joined(got) == "a</think>"


def test_a_family_that_opens_its_thinking_itself() -> None:
    how = plan(reasoning=MARKERS)

    opened = run([THINK, *words("hm"), THINK_END, *words("Hi")], how)
    straight = run([*words("Hi"), THINK, *words("!")], how)

    assert (joined(opened, ReasoningDelta), joined(opened)) == ("hm", "Hi")
    assert last(opened).usage.reasoning_tokens == 4
    assert (joined(straight, ReasoningDelta), joined(straight)) == ("", "Hi!")


def test_a_raw_prompt_has_no_thinking_to_split() -> None:
    """O88: all is text."""
    assert joined(run([*words("a"), THINK_END, *words("b")], plan())) == "a</think>b"


def test_a_character_that_the_bound_cuts_is_dropped() -> None:
    """O81, B-049."""
    got = run([THINK_END, *words("a\U0001f60a")[:4]], thinking())

    assert joined(got) == "a"
    assert last(got).usage.completion_tokens == 5


def test_half_a_character_of_the_thinking_does_not_spoil_the_answer() -> None:
    got = run([*words("\U0001f60a")[:2], THINK_END, *words("Hi")], thinking())

    assert (joined(got, ReasoningDelta), joined(got)) == ("", "Hi")


async def test_a_failure_is_raised_and_never_an_end() -> None:
    """B-056, B-059: what was sent stays sent."""
    worker = FakeWorker(words("ab"), Failed(R, "internal_error", "the step failed"))
    stream = deltas(worker.events(), plan())

    got = [await anext(stream), await anext(stream)]
    with pytest.raises(AnswerFailed, match="the step failed") as failed:
        await anext(stream)

    assert failed.value.code == "internal_error"
    assert [d.text for d in got if isinstance(d, TextDelta)] == ["a", "b"]


async def test_events_that_just_end_are_a_failure() -> None:
    with pytest.raises(AnswerFailed) as failed:
        await gather(FakeWorker(words("a"), None), plan())

    assert failed.value.code == "internal_error"


async def test_a_reader_that_leaves_closes_the_events() -> None:
    """O85."""
    worker = FakeWorker(words("abc"), finished())
    stream = deltas(worker.events(), plan())

    await anext(stream)
    await stream.aclose()

    assert worker.closed_early
    assert worker.emitted == 1


def test_stop_ids_for_the_engine_are_all_of_them_once() -> None:
    assert plan(end_ids=(5, 6), stop_token_ids=(6, 7)).stop_ids == (5, 6, 7)

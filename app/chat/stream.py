"""token events -> text and reasoning deltas."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from app.chat.events import Delta, Done, ReasoningDelta, TextDelta, Usage
from app.chat.reasoning import Part, ReasoningMarkers, ReasoningParser
from app.chat.stops import StopStrings
from app.errors import AnswerFailed
from app.tokens import Tokenizer
from engine.messages import Event, Failed, Finished, FinishReason, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How one answer is read; made by `Prompter.answer_plan`.

    Attributes:
        reasoning: markers of the family; None shows everything as text.
        stop: strings that end the answer; they are looked for in content, not in thinking.
        end_ids: end-of-sequence ids that count as such.
        stop_token_ids: ids that the client named.
        min_tokens: the text of so many first tokens holds no stop string.
    """

    tokenizer: Tokenizer
    prompt_tokens: int
    image_tokens: int = 0
    reasoning: ReasoningMarkers | None = None
    starts_in_reasoning: bool = False
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends the answer, for its `Generate`."""
        return tuple(dict.fromkeys((*self.end_ids, *self.stop_token_ids)))


class Answer:
    """One answer as it grows: token ids in, deltas out; a state machine.

    Attributes:
        stopped: a stop string ended it, and the engine does not know yet.
        cached_tokens: of the prompt, as the first token tells; known before any ending is (O36).
    """

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._stop_ids = frozenset(plan.stop_ids)
        self._detokenizer = plan.tokenizer.detokenizer()
        self._reasoning = ReasoningParser(plan.reasoning, inside=plan.starts_in_reasoning)
        self._stops = StopStrings(plan.stop)
        self._tokens = 0
        self._reasoning_tokens = 0
        self.cached_tokens = 0

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    def feed(self, id_: int) -> Delta | None:
        """The next token; None when nothing can be shown yet."""
        if self.stopped or id_ in self._stop_ids:
            return None  # the token that ends an answer is no part of it
        self._tokens += 1
        match self._reasoning.feed(id_):
            case Part.MARKER:
                self._reasoning_tokens += 1
                self._detokenizer.close()
            case Part.REASONING:
                self._reasoning_tokens += 1
                if text := self._detokenizer.feed(id_):
                    return ReasoningDelta(
                        text, self._tokens, self._reasoning_tokens, self.cached_tokens
                    )
            case Part.CONTENT:
                text = self._detokenizer.feed(id_)
                if text and self._tokens > self._plan.min_tokens:
                    text = self._stops.feed(text)
                return self._shown(text)
        return None

    def close(self) -> TextDelta | None:
        """Text that was held back for a stop string that did not come."""
        return None if self.stopped else self._shown(self._stops.close())

    def done(self, end: Finished | None) -> Done:
        """How it ended; `end` is None when a stop string did it."""
        usage = Usage(
            prompt_tokens=self._plan.prompt_tokens,
            completion_tokens=self._tokens,
            reasoning_tokens=self._reasoning_tokens,
            cached_tokens=self.cached_tokens or (end.cached_tokens if end else 0),
            image_tokens=self._plan.image_tokens,
        )
        if self.stopped:
            return Done("stop", self._stops.matched, usage)
        stop_id = end.stop_id if end else None
        named = stop_id if stop_id in self._plan.stop_token_ids else None
        reason: FinishReason = end.reason if end else "stop"
        if self._reasoning.inside and named is None:
            reason = "length"  # it never came to the answer, whatever ended it (O34)
        return Done(reason, named, usage)

    def _shown(self, text: str) -> TextDelta | None:
        if not text:
            return None
        return TextDelta(text, self._tokens, self._reasoning_tokens, self.cached_tokens)


async def deltas(events: AsyncIterator[Event], plan: AnswerPlan) -> AsyncGenerator[Delta]:
    """What one answer yields, ending with its one `Done`.

    The events are closed, which aborts the request, as soon as a stop string is complete, and when
    this generator is closed early.

    Raises:
        AnswerFailed: the request failed on the way; nothing follows.
    """
    answer = Answer(plan)
    try:
        async for event in events:
            match event:
                case Token(id=id_, cached_tokens=cached):
                    answer.cached_tokens = answer.cached_tokens or cached
                    delta = answer.feed(id_)
                    if answer.stopped:
                        await _close(events)  # first of all: the engine is working on
                    if delta is not None:
                        yield delta
                    if answer.stopped:
                        yield answer.done(None)
                        return
                case Finished():
                    if (rest := answer.close()) is not None:
                        yield rest
                    yield answer.done(event)
                    return
                case Failed(code=code, message=message):
                    raise AnswerFailed(code, message)
        raise AnswerFailed("internal_error", "The answer ended without saying why.")
    finally:
        await _close(events)


async def _close(events: AsyncIterator[Event]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()

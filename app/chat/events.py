"""what a stream yields: text, reasoning, and how it ended."""

from __future__ import annotations

import msgspec

from engine.messages import FinishReason


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as O36 defines them; the same for a stream and a whole answer."""

    prompt_tokens: int
    completion_tokens: int  # without the token that ended it
    reasoning_tokens: int  # with the end marker
    cached_tokens: int
    image_tokens: int


class TextDelta(msgspec.Struct, frozen=True):
    """New text of the answer, whole characters; the counts so far."""

    text: str
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0


class ReasoningDelta(msgspec.Struct, frozen=True):
    """New text of the thinking, whole characters; the counts so far."""

    text: str
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0


class Done(msgspec.Struct, frozen=True):
    """The last of a stream. `stop_reason` is the stop string or stop token id, else None."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage


Delta = TextDelta | ReasoningDelta | Done

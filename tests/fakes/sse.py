"""A strict reader of event streams: whatever O79 to O84 forbid is an assertion (test plan 18.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import orjson


@dataclass
class Stream:
    """A stream that was read to its end and found to be in order."""

    chunks: list[dict[str, Any]]  # in order; the usage chunk is not among them
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    done: bool  # [DONE] came

    def joined(self, part: str = "content", index: int = 0) -> str:
        """The deltas of one choice, joined."""
        return "".join(
            c["delta"].get(part, "")
            for chunk in self.chunks
            for c in chunk["choices"]
            if c["index"] == index
        )

    def text(self, index: int = 0) -> str:
        """The text of one choice of a plain completion."""
        return "".join(
            c["text"] for chunk in self.chunks for c in chunk["choices"] if c["index"] == index
        )

    def finish_reasons(self) -> list[str]:
        found = (c["finish_reason"] for chunk in self.chunks for c in chunk["choices"])
        return [reason for reason in found if reason]


def read_stream(answer: httpx.Response) -> Stream:
    """Read a whole stream; head and frames are checked."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers
    return read_frames(answer.content)


def read_frames(data: bytes) -> Stream:
    """The frames of a stream's body, checked."""
    text = data.decode("utf-8")  # strictly: a half character would raise
    assert text.endswith("\n\n")
    frames = text.removesuffix("\n\n").split("\n\n")
    events = [_event(frame) for frame in frames if not frame.startswith(":")]
    done = events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    values = [orjson.loads(event) for event in (events[:-1] if done else events)]
    error = values.pop()["error"] if values and "error" in values[-1] else None
    assert all("error" not in value for value in values)
    assert not (done and error), "[DONE] after an error looks like success (O84)"
    assert done or error, "a stream ends with [DONE] or with an error"
    return _checked(values, error, done)


def _event(frame: str) -> str:
    assert frame.startswith("data: "), f"a line that is neither data nor comment: {frame[:80]!r}"
    assert "\n" not in frame
    event = frame.removeprefix("data: ")
    assert event, "an event without data"
    return event


def _checked(values: list[dict[str, Any]], error: dict[str, Any] | None, done: bool) -> Stream:
    usage = None
    if values and values[-1]["choices"] == []:
        usage = values.pop()["usage"]
    with_usage = ["usage" in value for value in values]
    assert all(with_usage) or not any(with_usage)
    for name in ("id", "object", "created", "model", "system_fingerprint"):
        assert len({value[name] for value in values}) <= 1, f"{name} changes within the stream"
    for value in values:
        assert value["choices"], "only the usage chunk has no choices"
        assert value["service_tier"] == "default"
        for choice in value["choices"]:
            assert choice["logprobs"] is None
    if error is not None:
        assert set(error) == {"message", "type", "param", "code"}
        assert usage is None
    for index in {c["index"] for value in values for c in value["choices"]}:
        mine = [c for value in values for c in value["choices"] if c["index"] == index]
        _check_choice(mine, error is None)
    return Stream(values, usage, error, done)


def _check_choice(mine: list[dict[str, Any]], complete: bool) -> None:
    ends = [c["finish_reason"] for c in mine]
    assert all(end is None for end in ends[:-1]), "a finish_reason before the last chunk"
    assert (ends[-1] in ("stop", "length")) == complete
    if "delta" not in mine[0]:
        return
    deltas = [c["delta"] for c in mine]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    if complete:
        assert deltas[-1] == {}
    for delta in deltas[1 : -1 if complete else None]:
        assert len(set(delta.values())) == 1  # two names of the thinking tell the same (O34)
        assert all(isinstance(text, str) and text for text in delta.values())
    kinds = ["content" not in delta for delta in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True), "thinking comes before the answer"

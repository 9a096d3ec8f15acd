"""split thinking from answer while it streams.

The split is by token and not by text: the markers are added tokens, which nobody can type and no
text can imitate, so nothing has to be held back for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

OPEN, CLOSE = "<think>", "</think>"


class Part(Enum):
    """What a generated token belongs to."""

    REASONING = "thinking, which ends with its marker"
    MARKER = "a reasoning marker, never shown"
    CONTENT = "the answer"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Ids of the tokens around thinking."""

    open: int
    close: int

    @classmethod
    def of(cls, markers: Mapping[str, int]) -> ReasoningMarkers | None:
        """Those of a tokenizer; None for a family that does not think in the open."""
        if OPEN in markers and CLOSE in markers:
            return cls(markers[OPEN], markers[CLOSE])
        return None

    def open_at_end(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to this prompt starts inside the thinking."""
        last = next((id_ for id_ in reversed(prompt) if id_ in (self.open, self.close)), None)
        return last == self.open


class ReasoningParser:
    """Says of each token of one answer where it belongs.

    Thinking is what comes before the first end marker, in an answer that starts inside it or whose
    first token opens it. All else is content; a marker in there is not shown either (O34).
    """

    __slots__ = ("_fresh", "_markers", "inside")

    def __init__(self, markers: ReasoningMarkers | None, *, inside: bool) -> None:
        self.inside = inside and markers is not None
        self._markers = markers
        self._fresh = not inside

    def feed(self, id_: int) -> Part:
        """Where the next token belongs."""
        markers = self._markers
        if markers is not None and id_ in (markers.open, markers.close):
            self.inside = id_ == markers.open and (self.inside or self._fresh)
            self._fresh = False
            return Part.MARKER
        self._fresh = False
        return Part.REASONING if self.inside else Part.CONTENT

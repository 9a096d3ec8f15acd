"""stop strings: hold back what may be one, cut exactly where one begins."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text of one answer in, text that is safe to show out; a state machine.

    The stop string that is complete first ends the answer; of two that end at the same character,
    the longer. So the outcome depends on the text alone and never on where it was cut (O37).

    Attributes:
        matched: the stop string that ended the text, once one did.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What can be shown now; nothing more comes once `matched` is set."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        complete = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if complete:
            _, at, self.matched = min(complete)
            self._held = ""
            return text[:at]
        safe = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[safe:]
        return text[:safe]

    def close(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0

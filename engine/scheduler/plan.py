"""StepPlan and StepResult: the contract between the scheduler and the pipeline.

A plan names rows by slot and count, never by the value of the last token: the pipeline keeps the
token that a slot's last step drew on its device, and a decode row reads it there. So step n+1 can
be planned and launched before the tokens of step n are on the host (a GPU reads them one step
late).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import ServerError
from engine.messages import RequestId, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the token behind a sequence's last row is drawn."""

    sampling: Sampling
    choice: int
    position: int  # index of the drawn token in prompt + answer; the draw's counter (O30)
    banned: tuple[int, ...] = ()  # ids that must not be drawn (stop ids before min_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one sequence does in a step: rows [start, start + count)."""

    request: RequestId
    slot: int
    start: int  # committed rows L: computed before this step
    count: int  # rows of this step k, at least 1
    tokens: tuple[int, ...] | None  # their ids; None: one row, the token this slot drew last
    pages: tuple[int, ...]  # every page of the sequence, in order, enough for start + count rows
    draw: Draw | None  # None: an inner prompt chunk, nothing is drawn
    fresh: bool = False  # the slot's first step for this sequence: its state starts at zero
    load: int | None = None  # or from this snapshot, taken behind row `start - 1` of a like prefix
    save: int | None = None  # snapshot that the state is copied to behind the last row

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.tokens) != self.count:
            raise AssertionError(f"{self.request}: {self.count} rows but {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: sequences with one row first (decode), then longer ones (prompt chunks)."""

    number: int
    work: tuple[Work, ...]

    @property
    def total_tokens(self) -> int:
        return sum(w.count for w in self.work)

    @property
    def loads(self) -> list[tuple[int, int, int]]:
        """Slot, rows that are there, and snapshot of each sequence that starts from one."""
        return [(w.slot, w.start, w.load) for w in self.work if w.load is not None]

    @property
    def saves(self) -> list[tuple[int, int]]:
        """Slot and snapshot of each state that is to be kept."""
        return [(w.slot, w.save) for w in self.work if w.save is not None]

    def tokens_of(self, request: RequestId) -> int:
        return sum(w.count for w in self.work if w.request == request)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token; `logprob` is of the model's own distribution, natural logarithm."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of a plan: tokens drawn, and requests that failed on their own."""

    number: int
    drawn: Mapping[RequestId, Drawn]
    failed: Mapping[RequestId, ServerError] = field(default_factory=dict)

"""a request and its phase: Waiting, Running, Finished.

Counts are stored and phases derived. Of a running request:

    0 ............ computed ............ length ............ limit
      rows of steps    | unseen: tokens       | tokens that
      already planned  | without a row yet    | may still come

    length = tokens on the host + tokens promised by steps whose results are still on their way

Rows [0, reused) of a prefix that is known were never planned: their pages are shared.
While `computed` is below `prefix` (what was known when the slot was taken) its rows are a prompt
chunk with ids; from there on each step is one row, the token that the slot drew last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.cache.pages import PageId, SlotId, SnapshotId
from engine.cache.prefix import Block, Chain
from engine.messages import Generate, Picture, RequestId
from engine.spec import ModelSpec

Outcome = Literal["stop", "length", "aborted", "failed"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue, with nothing of its own."""

    since_s: float


@dataclass(slots=True)
class Running:
    """Owner of a slot and of pages; both exist exactly while a request runs."""

    slot: SlotId
    pages: tuple[PageId, ...]
    prefix: int  # tokens known when the slot was taken; their rows come from the host
    since_s: float
    pictures_ready: bool
    computed: int = 0  # rows that steps were planned for
    promised: int = 0  # tokens drawn by steps whose results are not on the host yet
    last_step: int = 0  # number of the last step that uses slot and pages
    turn_s: float = 0.0  # when it last got rows
    reused: int = 0  # rows that were there when the slot was taken
    load: SnapshotId | None = None  # of the state behind them, until the first step is planned
    confirmed: int = 0  # rows of steps whose results are in
    blocks: list[Block] = field(default_factory=list)  # of the prefix cache: reused, then entered
    stops: list[int] = field(default_factory=list)  # rows behind which to take a snapshot, in order
    saved: dict[int, SnapshotId] = field(default_factory=dict)  # snapshots by page, confirmed

    @property
    def in_prompt(self) -> bool:
        """Whether the next rows come from the host."""
        return self.computed < self.prefix

    @property
    def next_prompt_rows(self) -> int:
        """Rows from the host that one step may have: it ends where a snapshot is taken."""
        return (self.stops[0] if self.stops else self.prefix) - self.computed


@dataclass(frozen=True, slots=True)
class Finished:
    """Over; nothing is held for it any more."""

    outcome: Outcome


Phase = Waiting | Running | Finished


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, the tokens known so far, and the phase."""

    ask: Generate
    arrival: int  # place in the order of arrival
    tokens: list[int]  # prompt, then every generated token that is on the host
    limit: int  # length at which it ends: prompt + max_tokens, at most C (R44, R72)
    phase: Phase
    arrived_s: float
    paused: bool = False
    requeues: int = 0  # times it went back to the queue for want of memory (rule 89)
    queue_s: float = 0.0
    prefill_s: float = 0.0
    chain: Chain | None = None  # keys of its pages, once somebody looked for them
    cached_tokens: int | None = None  # of the prompt, reused at its first slot (O36)

    @property
    def id(self) -> RequestId:
        return self.ask.request

    @property
    def prompt_tokens(self) -> int:
        return len(self.ask.prompt)

    @property
    def unseen_pictures(self) -> tuple[Picture, ...]:
        """Pictures with rows that are still to be computed; all of them without a slot."""
        seen = self.phase.computed if isinstance(self.phase, Running) else 0
        return tuple(p for p in self.ask.pictures if p.position + p.tokens > seen)

    def length(self, running: Running) -> int:
        """Tokens known or promised."""
        return len(self.tokens) + running.promised

    def unseen(self, running: Running) -> int:
        """Tokens the model has not yet seen: a prompt chunk, or one token of the answer."""
        length = self.length(running)
        return length - running.computed if running.in_prompt or length < self.limit else 0


def alignment_error(ask: Generate, spec: ModelSpec) -> str | None:
    """Why prompt and pictures are out of step (rules 28 and 35); None when they agree.

    Every run of placeholders is one picture, as long as that picture has rows, in order; and no
    token of an answer is one.
    """
    token = spec.image_token
    if token is None:
        return "pictures were sent to a model without pictures" if ask.pictures else None
    runs = _runs(ask.prompt, token)
    pictures = [_run(picture) for picture in ask.pictures]
    if runs != pictures:
        return (
            f"placeholder runs (position, length) are {runs} and the pictures want {pictures}; "
            "each picture needs one run of its own length"
        )
    if token in ask.emitted:
        return "a placeholder stands among the generated tokens"
    return None


def _run(picture: Picture) -> tuple[int, int]:
    return picture.position, picture.tokens


def _runs(prompt: Sequence[int], token: int) -> list[tuple[int, int]]:
    """Position and length of each run of `token`."""
    if token not in prompt:
        return []
    edges = np.flatnonzero(np.diff(np.asarray(prompt) == token, prepend=False, append=False))
    starts, ends = edges[::2].tolist(), edges[1::2].tolist()
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]

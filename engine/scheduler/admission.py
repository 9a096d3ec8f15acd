"""what may keep a request waiting, or out: one small check each, in a list.

Admission goes in order of arrival and nobody overtakes (R74). A request gets all pages of its
known tokens and of a first part of its answer at once; a longer answer gets more page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from engine.cache.budget import CachePlan
from engine.cache.pages import pages_for
from engine.messages import Generate
from engine.scheduler.request import Request, alignment_error
from engine.spec import ModelSpec

WATERMARK_TOKENS = 128  # of the answer, counted at admission


class Obstacle(StrEnum):
    """Why the head of the queue waits; the value is the metric's label."""

    NO_SLOT = "no_slot"
    NO_PAGES = "no_pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free at this moment."""

    slots_free: int
    pages_free: int
    pages_total: int
    page_tokens: int


Check = Callable[[Request, Room], Obstacle | None]


def reservation(request: Request, room: Room) -> int:
    """Pages that the request gets at admission; never more than the pool has."""
    rest = max(request.limit - len(request.tokens), 0)
    rows = len(request.tokens) + min(rest, WATERMARK_TOKENS)
    return min(pages_for(rows, room.page_tokens), room.pages_total)


def slot_free(_: Request, room: Room) -> Obstacle | None:
    """One state slot."""
    return None if room.slots_free else Obstacle.NO_SLOT


def pages_free(request: Request, room: Room) -> Obstacle | None:
    """Its whole reservation.

    One that is above the pool is cut to the pool, so it is admitted when nothing else runs.
    """
    return None if reservation(request, room) <= room.pages_free else Obstacle.NO_PAGES


CHECKS: tuple[Check, ...] = (slot_free, pages_free)


def obstacle(request: Request, room: Room) -> Obstacle | None:
    """The first reason this request has to wait; None when there is none."""
    return next((why for check in CHECKS if (why := check(request, room))), None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in at all; `reason` is for the log."""

    code: str
    reason: str


Rule = Callable[[Generate, ModelSpec, CachePlan], Refusal | None]


def too_long(ask: Generate, _: ModelSpec, caches: CachePlan) -> Refusal | None:
    """The backstop of R69 and R73: a prompt leaves a place for one token and fits the pool."""
    longest = min(caches.context - 1, caches.pool_tokens)
    over = len(ask.prompt) - longest
    if over <= 0:
        return None
    return Refusal(
        "context_length_exceeded",
        f"The prompt has {len(ask.prompt)} tokens and at most {longest} fit; remove {over}.",
    )


def bad_ids(ask: Generate, spec: ModelSpec, _: CachePlan) -> Refusal | None:
    """Ids are used as an index, so none may lie outside the vocabulary (rule 85)."""
    ids = (*ask.prompt, *ask.emitted)
    if not ask.prompt or ask.max_tokens < 1:
        return Refusal("internal_error", "an empty prompt, or a bound below one token")
    if min(ids) < 0 or max(ids) >= spec.usable_vocab:
        return Refusal("internal_error", f"a token id outside [0, {spec.usable_vocab})")
    return None


def misaligned(ask: Generate, spec: ModelSpec, _: CachePlan) -> Refusal | None:
    """Placeholders and pictures agree (rules 28 and 35)."""
    reason = alignment_error(ask, spec)
    return Refusal("internal_error", reason) if reason else None


RULES: tuple[Rule, ...] = (too_long, bad_ids, misaligned)


def refusal(ask: Generate, spec: ModelSpec, caches: CachePlan) -> Refusal | None:
    """The first reason not to take a request in; the server has checked the same before."""
    return next((why for rule in RULES if (why := rule(ask, spec, caches))), None)

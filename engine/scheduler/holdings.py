"""pages and slots of running requests: who holds them, and when they may be used again.

What a step uses is given back only when no step that was planned before the end is on its way:

    plan 7 | plan 8 | commit 7: stop | plan 9 | commit 8: row wasted, slot and pages come back
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.budget import CachePlan
from engine.cache.pages import PageId, PagePool, SlotId, SlotPool, pages_for
from engine.scheduler.admission import Room, reservation
from engine.scheduler.request import Request, Running


@dataclass(frozen=True, slots=True)
class Leaving:
    """A slot and pages that a step on its way may still use."""

    last_step: int
    slot: SlotId
    pages: tuple[PageId, ...]


class Holdings:
    """Owner of the pools: every slot and page is free, held by one running request, or leaving."""

    def __init__(self, caches: CachePlan) -> None:
        self.pages = PagePool(caches.pages, caches.page_tokens)
        self.slots = SlotPool(caches.slots)
        self._page_tokens = caches.page_tokens
        self._leaving: list[Leaving] = []
        self._freed: list[SlotId] = []

    def room(self, owed_pages: int = 0) -> Room:
        """What is free at this moment, but for pages that running requests need now."""
        return Room(
            slots_free=self.slots.free,
            pages_free=self.pages.free - owed_pages,
            pages_total=self.pages.total,
            page_tokens=self._page_tokens,
        )

    def seat(self, request: Request, now: float) -> Running:
        """A slot and the reserved pages for a request that no check kept back."""
        with self.pages.reserve(reservation(request, self.room())) as pages:
            return Running(
                slot=self.slots.take(),
                pages=pages,
                prefix=len(request.tokens),
                since_s=now,
                turn_s=now,
                pictures_ready=not request.ask.pictures,
            )

    def fits(self, running: Running) -> bool:
        """Whether the next row has its page already."""
        return running.computed < len(running.pages) * self._page_tokens

    def can_ever_fit(self, running: Running) -> bool:
        """Whether the whole pool would hold one more row of this request."""
        return pages_for(running.computed + 1, self._page_tokens) <= self.pages.total

    def grow(self, running: Running) -> bool:
        """One more page, if there is one."""
        if not self.pages.free:
            return False
        with self.pages.reserve(1) as page:
            running.pages += page
        return True

    @property
    def pages_come_back(self) -> bool:
        """Whether pages will be free when a step on its way is done."""
        return any(leaving.pages for leaving in self._leaving)

    def retire(self, running: Running) -> None:
        """The occupation has ended; `let_go` frees what it held as soon as that is safe."""
        self._leaving.append(Leaving(running.last_step, running.slot, running.pages))

    def let_go(self, oldest_step: int) -> None:
        """Free what no step from `oldest_step` on can use (rules 61 and 86)."""
        if not self._leaving:
            return
        kept = []
        for leaving in self._leaving:
            if leaving.last_step < oldest_step:
                self.pages.release(leaving.pages)
                self.slots.release(leaving.slot)
                self._freed.append(leaving.slot)
            else:
                kept.append(leaving)
        self._leaving = kept

    def take_freed(self) -> list[SlotId]:
        """Slots freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

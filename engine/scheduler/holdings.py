"""pages and slots of running requests: who holds them, and when they may be used again.

What a step uses is given back only when no step that was planned before the end is on its way:

    plan 7 | plan 8 | commit 7: stop | plan 9 | commit 8: row wasted, slot and pages come back
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.cache.budget import CachePlan
from engine.cache.pages import PageId, PagePool, SlotId, SlotPool, SnapshotId, pages_for
from engine.cache.prefix import NOTHING, Block, Chain, Match, PrefixCache
from engine.scheduler.admission import Room, reservation
from engine.scheduler.request import Request, Running


@dataclass(frozen=True, slots=True)
class Leaving:
    """A slot and pages that a step on its way may still use."""

    last_step: int
    slot: SlotId
    pages: tuple[PageId, ...]
    blocks: list[Block]


class Holdings:
    """Owner of the pools: every slot and page is free, kept for reuse, held, or leaving."""

    def __init__(self, caches: CachePlan) -> None:
        self.pages = PagePool(caches.pages, caches.page_tokens)
        self.slots = SlotPool(caches.slots)
        self.prefixes = PrefixCache(caches, self.pages)
        self._page_tokens = caches.page_tokens
        self._grid = math.lcm(caches.snapshot_tokens, caches.page_tokens)
        self._leaving: list[Leaving] = []
        self._freed: list[SlotId] = []

    @property
    def pages_free(self) -> int:
        """Pages that nobody needs: what is kept for reuse goes when it is wanted."""
        return self.pages.free + self.prefixes.idle

    def find(self, request: Request) -> Match:
        """Which pages hold a beginning of this request already; never all of its rows (R26)."""
        if not self.prefixes.on:
            return NOTHING
        size = self._page_tokens
        if request.chain is None:
            request.chain = Chain(request.ask.cache_salt, request.ask.pictures, size)
        tokens = request.tokens
        return self.prefixes.find(request.chain.reach(tokens, (len(tokens) - 1) // size))

    def room(self, owed_pages: int, match: Match) -> Room:
        """What is free at this moment, but for pages that running requests need now.

        Pages of the match that somebody holds anyway count on top: they cost nobody anything.
        """
        return Room(
            slots_free=self.slots.free,
            pages_free=self.pages_free + match.shared - owed_pages,
            pages_total=self.pages.total,
            page_tokens=self._page_tokens,
        )

    def seat(self, request: Request, match: Match, now: float) -> Running:
        """A slot and the reserved pages for a request that no check kept back."""
        want = reservation(request, self.room(0, match))
        shared = self.prefixes.hold(match)
        new = want - len(shared)
        if new > self.pages.free:
            self.prefixes.evict(new - self.pages.free)
        rows = len(shared) * self._page_tokens
        with self.pages.reserve(new) as own:
            return Running(
                slot=self.slots.take(),
                pages=shared + own,
                prefix=len(request.tokens),
                since_s=now,
                turn_s=now,
                pictures_ready=all(p.position + p.tokens <= rows for p in request.ask.pictures),
                computed=rows,
                reused=rows,
                confirmed=rows,
                load=match.snapshot,
                blocks=list(match.blocks),
                stops=self._stops(len(request.tokens), rows, match) if self.prefixes.on else [],
            )

    def _stops(self, tokens: int, reused: int, match: Match) -> list[int]:
        """Rows behind which the state of a prompt is worth keeping, in order.

        A coarse grid; where this prompt leaves a known one, because others may leave it there as
        well; and the last page end, for the same prompt again or with more behind it.
        """
        last = (tokens - 1) // self._page_tokens * self._page_tokens
        stops = {match.known * self._page_tokens, *range(self._grid, last + 1, self._grid)}
        if last - reused >= self._grid:  # a shorter one when it is seen a second time
            stops.add(last)
        return sorted(stop for stop in stops if stop > reused)

    def snapshot_behind(self, running: Running) -> SnapshotId | None:
        """A place for the state behind the rows planned so far, where that is worth keeping."""
        row = running.computed
        if running.stops and row == running.stops[0]:
            del running.stops[0]
        elif row % self._grid or row < running.prefix:
            return None
        return self.prefixes.take_snapshot()

    def loaded(self, running: Running) -> SnapshotId | None:
        """The snapshot that the first step starts from; steps behind it may write its place."""
        place, running.load = running.load, None
        if place is not None:
            self.prefixes.snapshots.release(place)
        return place

    def confirm(self, running: Running, rows: int, snapshot: SnapshotId | None) -> None:
        """A step that ended at this row went well; its snapshot can be used."""
        running.confirmed = rows
        if snapshot is not None:
            running.saved[rows // self._page_tokens - 1] = snapshot

    def enter(self, request: Request, running: Running) -> None:
        """Make the pages whose results are in findable for others."""
        if self.prefixes.on and request.chain is not None:
            keys = request.chain.reach(request.tokens, running.confirmed // self._page_tokens)
            self.prefixes.enter(running.blocks, keys, running.pages, running.saved)

    def forget(self, running: Running) -> None:
        """Take back what a sequence that failed made findable (R66)."""
        self.prefixes.forget(running.blocks[running.reused // self._page_tokens :])

    def fits(self, running: Running) -> bool:
        """Whether the next row has its page already."""
        return running.computed < len(running.pages) * self._page_tokens

    def can_ever_fit(self, running: Running) -> bool:
        """Whether the whole pool would hold one more row of this request."""
        return pages_for(running.computed + 1, self._page_tokens) <= self.pages.total

    def grow(self, running: Running) -> bool:
        """One more page, if there is one."""
        if not self.pages.free and not self.prefixes.evict(1):
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
        self.loaded(running)
        for snapshot in running.saved.values():
            self.prefixes.snapshots.release(snapshot)
        running.saved = {}
        self._leaving.append(
            Leaving(running.last_step, running.slot, running.pages, running.blocks)
        )

    def drop(self, snapshot: SnapshotId | None) -> None:
        """Give back the place of a snapshot whose sequence has ended, or whose step failed."""
        if snapshot is not None:
            self.prefixes.snapshots.release(snapshot)

    def let_go(self, oldest_step: int) -> None:
        """Free what no step from `oldest_step` on can use (rules 61 and 86)."""
        if not self._leaving:
            return
        kept = []
        for leaving in self._leaving:
            if leaving.last_step < oldest_step:
                self.prefixes.leave(leaving.blocks)
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

"""which pages already hold a token prefix: chain keys, least recently used out first (host only).

A block is one whole page, found by a key that stands for all before it:

    key(page) = sha256(key(page before) | ids of the page | pictures that reach into it)

with the salt of the request in front of the first. A prefix can be used up to a block that has a
snapshot of the recurrent state behind its last row (glm5_next.md 13).

A block is pinned while a sequence uses it, idle from then on. Idle blocks are room: admission
counts them as free, and they go when somebody needs their pages, or when all blocks and snapshots
take more than the byte budget.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.cache.budget import CachePlan
from engine.cache.pages import PageId, PagePool, SnapshotId, SnapshotPool
from engine.messages import Picture

_PLACE = struct.Struct(
    "<qqq"
)  # first row of a picture from the page's start, its rows, digest bytes


class Chain:
    """The keys of one request's pages, in order; they grow with its tokens.

    Args:
        salt: only requests of the same salt have equal keys.
        pictures: of the request; a page that holds rows of one has its digest in the key (rule 38).
        page_tokens: ids a page.
    """

    def __init__(self, salt: str, pictures: Sequence[Picture], page_tokens: int) -> None:
        self.keys: list[bytes] = []
        self._last = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).digest()
        self._pictures = pictures
        self._page_tokens = page_tokens

    def reach(self, tokens: Sequence[int], pages: int) -> list[bytes]:
        """Keys of the first `pages` pages; the tokens begin as those of earlier calls did."""
        size = self._page_tokens
        for page in range(len(self.keys), pages):
            start = page * size
            link = hashlib.sha256(self._last)
            link.update(np.array(tokens[start : start + size], "<i8").tobytes())
            for picture in self._pictures:
                if picture.position < start + size and picture.position + picture.tokens > start:
                    digest = picture.digest.encode()
                    link.update(_PLACE.pack(picture.position - start, picture.tokens, len(digest)))
                    link.update(digest)
            self._last = link.digest()
            self.keys.append(self._last)
        return self.keys[:pages]


@dataclass(slots=True, eq=False)
class Block:
    """One page of a known prefix. `users` are running sequences that hold it."""

    key: bytes
    parent: Block | None
    page: PageId
    users: int
    snapshot: SnapshotId | None = None  # of the state behind the page's last row
    alive: bool = True  # whether it can still be found
    children: set[Block] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prefix is there: blocks that can be used, and how many pages are known in all."""

    blocks: tuple[Block, ...] = ()
    known: int = 0

    @property
    def shared(self) -> int:
        """Blocks that running sequences hold anyway."""
        return sum(1 for block in self.blocks if block.users)

    @property
    def snapshot(self) -> SnapshotId | None:
        """Where the state behind the last usable block is kept."""
        return self.blocks[-1].snapshot if self.blocks else None


NOTHING = Match()


class PrefixCache:
    """Owner of the blocks and of the snapshot places; pages belong to the pool that it is given."""

    def __init__(self, caches: CachePlan, pages: PagePool) -> None:
        self.on = caches.reuse_bytes > 0
        self.snapshots = SnapshotPool(caches.snapshots if self.on else 0)
        self._pages = pages
        self._page_bytes = caches.page_bytes
        self._snapshot_bytes = caches.slot_bytes
        self._budget = caches.reuse_bytes
        self._blocks: dict[bytes, Block] = {}
        # Least recently used first. A sequence lets its last block go first, so a block is never
        # older here than those in front of it in a chain.
        self._idle: OrderedDict[bytes, Block] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that can be had by `evict`, which is to say: free."""
        return len(self._idle)

    @property
    def blocks(self) -> int:
        """Pages that can be found."""
        return len(self._blocks)

    @property
    def size(self) -> int:
        """Bytes of all blocks and snapshots."""
        return len(self._blocks) * self._page_bytes + self.snapshots.out * self._snapshot_bytes

    def find(self, keys: Iterable[bytes]) -> Match:
        """The longest known beginning; nothing is held yet."""
        found: list[Block] = []
        usable = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
            if block.snapshot is not None:
                usable = len(found)
        return Match(tuple(found[:usable]), len(found)) if found else NOTHING

    def hold(self, match: Match) -> tuple[PageId, ...]:
        """One more user for each block of a match, one more owner for its pages and its snapshot.

        Returns: the pages; they are to be read, never written.
        """
        for block in match.blocks:
            block.users += 1
            self._idle.pop(block.key, None)
        pages = tuple(block.page for block in match.blocks)
        self._pages.share(pages)
        if match.snapshot is not None:
            self.snapshots.share(match.snapshot)
        return pages

    def enter(
        self,
        held: list[Block],
        keys: Sequence[bytes],
        pages: Sequence[PageId],
        snapshots: dict[int, SnapshotId],
    ) -> None:
        """Make the first pages of a sequence findable, as far as the budget goes.

        Args:
            held: blocks that the sequence holds; new ones are added. Where one of them was
                forgotten, what was computed behind it is not entered either.
            keys: of the pages, from the first on.
            pages: of the sequence, computed to their ends by steps whose results are in.
            snapshots: by page; those that found a block without one are taken out.
        """
        if not all(block.alive for block in held):
            return
        parent: Block | None = None
        path = []
        for number, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                block = self._new_block(key, parent, pages[number])
                if block is None:
                    break
                held.append(block)
            if block.snapshot is None:
                block.snapshot = snapshots.pop(number, None)
            path.append(block)
            parent = block
        for block in reversed(path):
            if block.key in self._idle:  # another sequence's page of the same rows, used again
                self._idle.move_to_end(block.key)

    def leave(self, held: Iterable[Block]) -> None:
        """One user less for each block; the pages themselves are the pool's matter."""
        for block in reversed(tuple(held)):
            block.users -= 1
            if not block.users and block.alive:
                self._idle[block.key] = block

    def forget(self, blocks: Iterable[Block]) -> None:
        """Let nobody find these blocks any more, nor what was computed behind them (R66)."""
        for block in blocks:
            self._remove(block)

    def take_snapshot(self) -> SnapshotId | None:
        """A place for a snapshot, if need be that of the least recently used one; or None."""
        if not self.snapshots.total:
            return None
        if not self._make_room(self._snapshot_bytes):
            return None
        if self.snapshots.out == self.snapshots.total:
            oldest = next((b for b in self._idle.values() if b.snapshot is not None), None)
            if oldest is None:
                return None
            self._remove(oldest)
        return self.snapshots.take()

    def evict(self, pages: int) -> bool:
        """Give the pool back at least so many pages; False when fewer blocks are idle."""
        want = self._pages.free + pages
        while self._pages.free < want and self._idle:
            self._remove(next(iter(self._idle.values())))
        return self._pages.free >= want

    def clear(self) -> None:
        """Forget everything."""
        self.forget([block for block in self._blocks.values() if block.parent is None])

    def _new_block(self, key: bytes, parent: Block | None, page: PageId) -> Block | None:
        """A block for a page of a running sequence; None when there is no room in the budget."""
        if not self._make_room(self._page_bytes) or (parent is not None and not parent.alive):
            return None
        block = Block(key, parent, page, users=1)
        self._blocks[key] = block
        self._pages.share((page,))
        if parent is not None:
            parent.children.add(block)
        return block

    def _make_room(self, more: int) -> bool:
        while self.size + more > self._budget and self._idle:
            self._remove(next(iter(self._idle.values())))
        return self.size + more <= self._budget

    def _remove(self, block: Block) -> None:
        """A block goes with all blocks behind it; who uses one of them keeps its page."""
        if block.parent is not None:
            block.parent.children.discard(block)
        going = [block] if block.alive else []
        for gone in going:
            going.extend(gone.children)
            gone.children.clear()
            gone.alive = False
            del self._blocks[gone.key]
            self._idle.pop(gone.key, None)
            self._pages.release((gone.page,))
            if gone.snapshot is not None:
                self.snapshots.release(gone.snapshot)

"""page ids, slot ids and snapshot ids: reserve, share, release (host only)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NewType

from engine.errors import OutOfMemory

PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)
SnapshotId = NewType("SnapshotId", int)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many rows."""
    return -(-tokens // page_tokens)


class PagePool:
    """Which pages of the paged rows belong to nobody; each owner of a page gives it back itself.

    A page is `page_tokens` rows of every paged layer. Low ids go out first and a page that came
    back goes out next, so memory that was touched once is used again before memory that was not.
    A page with several owners is never written: whoever shares one only reads it.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        self.total = count
        self.page_tokens = page_tokens
        self._free = [PageId(page) for page in reversed(range(count))]
        self._owners: dict[PageId, int] = {}  # of pages that are out

    @property
    def free(self) -> int:
        """Pages that belong to nobody."""
        return len(self._free)

    @contextmanager
    def reserve(self, count: int) -> Iterator[tuple[PageId, ...]]:
        """Hand out pages; take them back if the block fails, leave them with the caller if not.

        Raises: OutOfMemory when fewer are free; nothing was handed out.
        """
        if count > len(self._free):
            raise OutOfMemory(
                f"{count} pages of {self.page_tokens} tokens are wanted and {len(self._free)} of "
                f"{self.total} are free."
            )
        cut = len(self._free) - count
        held = tuple(reversed(self._free[cut:]))
        del self._free[cut:]
        self._owners.update(dict.fromkeys(held, 1))
        try:
            yield held
        except BaseException:
            self.release(held)
            raise

    def share(self, pages: Iterable[PageId]) -> None:
        """One more owner for pages that are out. A page that is not out is our own bug."""
        for page in pages:
            if page not in self._owners:
                raise AssertionError(f"page {page} is shared and was not out")
            self._owners[page] += 1

    def owners(self, page: PageId) -> int:
        """How many will give this page back; 0 when it is free."""
        return self._owners.get(page, 0)

    def release(self, pages: Iterable[PageId]) -> None:
        """Take pages back, the last of a sequence first; one is free when its last owner did so.

        A page that is not out is our own bug.
        """
        for page in reversed(tuple(pages)):
            owners = self._owners.get(page)
            if owners is None:
                raise AssertionError(f"page {page} is given back and was not out")
            if owners > 1:
                self._owners[page] = owners - 1
            else:
                del self._owners[page]
                self._free.append(page)


class SlotPool:
    """Which state slots belong to nobody; one slot is one running sequence."""

    def __init__(self, count: int) -> None:
        self.total = count
        self._free = [SlotId(slot) for slot in reversed(range(count))]

    @property
    def free(self) -> int:
        """Slots that belong to nobody."""
        return len(self._free)

    def take(self) -> SlotId:
        """Hand out a slot. Raises OutOfMemory when none is free."""
        if not self._free:
            raise OutOfMemory(f"a state slot is wanted and none of {self.total} is free.")
        return self._free.pop()

    def release(self, slot: SlotId) -> None:
        """Take a slot back. A slot that is not out is our own bug."""
        if slot in self._free:
            raise AssertionError(f"slot {slot} is given back and was not out")
        self._free.append(slot)


class SnapshotPool:
    """Which places for snapshots of recurrent state belong to nobody; several may own one."""

    def __init__(self, count: int) -> None:
        self.total = count
        self._free = [SnapshotId(place) for place in reversed(range(count))]
        self._owners: dict[SnapshotId, int] = {}

    @property
    def out(self) -> int:
        """Places that belong to somebody."""
        return len(self._owners)

    def take(self) -> SnapshotId | None:
        """Hand out a place, or None when none is free."""
        if not self._free:
            return None
        place = self._free.pop()
        self._owners[place] = 1
        return place

    def share(self, place: SnapshotId) -> None:
        """One more owner for a place that is out."""
        self._owners[place] += 1

    def release(self, place: SnapshotId) -> None:
        """One owner less; the place is free when it was the last."""
        self._owners[place] -= 1
        if not self._owners[place]:
            del self._owners[place]
            self._free.append(place)

"""page ids and slot ids: reserve, release (host only)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NewType

from engine.errors import OutOfMemory

PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many rows."""
    return -(-tokens // page_tokens)


class PagePool:
    """Which pages of the paged rows belong to nobody; the owner of a page gives it back itself.

    A page is `page_tokens` rows of every paged layer. Low ids go out first and a page that came
    back goes out next, so memory that was touched once is used again before memory that was not.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        self.total = count
        self.page_tokens = page_tokens
        self._free = [PageId(page) for page in reversed(range(count))]
        self._out: set[PageId] = set()

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
        self._out.update(held)
        try:
            yield held
        except BaseException:
            self.release(held)
            raise

    def release(self, pages: Iterable[PageId]) -> None:
        """Take pages back, the last of a sequence first. A page that is not out is our own bug."""
        for page in reversed(tuple(pages)):
            if page not in self._out:
                raise AssertionError(f"page {page} is given back and was not out")
            self._out.remove(page)
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

"""Image rows of pictures that came before, by digest, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict

from engine.device.device import Array


class KeptRows:
    """Rows that the tower made, as long as they fit a byte budget; nothing changes them.

    An overlay that uses rows holds on to them by itself, so they may go at any time.

    Args:
        budget: bytes at most; 0 keeps nothing.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._rows: OrderedDict[str, Array] = OrderedDict()
        self.bytes = 0
        self.queries = 0  # pictures that were looked for
        self.hits = 0  # of them found

    def find(self, digest: str) -> Array | None:
        """The rows of a picture, which counts as used now."""
        self.queries += 1
        rows = self._rows.get(digest)
        if rows is not None:
            self.hits += 1
            self._rows.move_to_end(digest)
        return rows

    def keep(self, digest: str, rows: Array) -> None:
        """Keep rows that were seen to be finite; those used longest ago make room."""
        size = int(rows.nbytes)
        if digest in self._rows or size > self._budget:
            return
        while self.bytes + size > self._budget:
            _, gone = self._rows.popitem(last=False)
            self.bytes -= int(gone.nbytes)
        self._rows[digest] = rows
        self.bytes += size

    def clear(self) -> None:
        """Let all of them go."""
        self._rows.clear()
        self.bytes = 0

"""The odd picture files, what must come of each, and small files made on the spot."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

FOLDER = Path(__file__).parents[1] / "fixtures" / "images"


@dataclass(frozen=True)
class Entry:
    """One file of the manifest."""

    file: str
    decision: str  # accept, refuse, either
    size: tuple[int, int]
    probes: Sequence[tuple[int, int, Sequence[int], int]]
    code: str
    levels: int

    def __str__(self) -> str:
        return self.file

    @property
    def data(self) -> bytes:
        return (FOLDER / self.file).read_bytes()


def _entry(raw: dict[str, Any]) -> Entry:
    outcome = raw["outcome"]
    return Entry(
        raw["file"],
        outcome["decision"],
        tuple(outcome.get("size", (0, 0))),
        outcome.get("probes", ()),
        outcome.get("code", ""),
        outcome.get("min_distinct_levels", 0),
    )


ENTRIES = tuple(
    _entry(raw) for raw in json.loads((FOLDER / "manifest.json").read_text())["entries"]
)
FILES = tuple(entry for entry in ENTRIES if not entry.file.startswith("url_"))
URLS = tuple(entry for entry in ENTRIES if entry.file.startswith("url_"))


def assert_shows(rgb: npt.NDArray[np.uint8], entry: Entry) -> None:
    """The size, the pixels and the number of grey levels that the manifest lists."""
    assert rgb.dtype == np.uint8
    assert rgb.shape == (entry.size[1], entry.size[0], 3)
    for column, row, colour, tolerance in entry.probes:
        off = np.abs(rgb[row, column].astype(int) - colour).max()
        assert off <= tolerance, (entry.file, column, row, rgb[row, column], colour)
    assert len(np.unique(rgb[..., 0])) >= entry.levels


def png(rgb: npt.NDArray[np.uint8]) -> bytes:
    """A picture as PNG."""
    return saved(Image.fromarray(rgb), "PNG")


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """A picture in the given format."""
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """One PNG chunk."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: bytes) -> bytes:
    """A PNG from unfiltered rows; `more` are chunks before the pixel data."""
    stride = len(rows) // height
    filtered = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *more,
            chunk(b"IDAT", zlib.compress(filtered)),
            chunk(b"IEND", b""),
        )
    )

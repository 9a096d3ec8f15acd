"""Resize, cut into patches and normalise, as a PatchSpec says (NumPy and Pillow only)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from engine.errors import RequestError
from engine.messages import PatchSpec

Detail = Literal["auto", "low", "high", "original"]
DETAILS: Final[tuple[Detail, ...]] = ("auto", "low", "high", "original")
CHANNELS: Final = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """How a picture will be laid out, known before it is decoded.

    Units: rows, columns in patches; content_height, content_width in pixels, at the top left of
           the canvas, the rest of which is zero; tokens in prompt rows.
    """

    rows: int
    columns: int
    content_height: int
    content_width: int
    tokens: int

    @property
    def thw(self) -> tuple[int, int, int]:
        """Patches as the message carries them: (temporal, height, width)."""
        return (1, self.rows, self.columns)


def named_detail(detail: str | None) -> Detail:
    """The `detail` of an image part (O55), absent as `auto`. Raises `RequestError` for others."""
    for known in DETAILS:
        if detail == known:
            return known
    if detail is None:
        return "auto"
    raise RequestError("detail is none of auto, low, high and original.", code="invalid_value")


def plan_grid(height: int, width: int, spec: PatchSpec, detail: str | None = None) -> Grid:
    """Canvas, content and tokens of a picture, from its size alone.

    `auto`, `high` and `original` have the family's whole budget, which already scales down only
    what exceeds it. `low` has the smallest budget the family knows, never above what `high` costs.

    Units:  height, width in pixels, upright
    Source: `smart_resize` of the reference image processor (glm5_next.md section 10)
    """
    full = _grid(height, width, spec, _canvas(height, width, spec, spec.max_tokens))
    if named_detail(detail) != "low":
        return full
    low = _grid(height, width, spec, _canvas_for_low(height, width, spec))
    return min(low, full, key=lambda grid: grid.tokens)


def cut(
    picture: Image.Image | npt.NDArray[np.uint8], spec: PatchSpec, grid: Grid
) -> npt.NDArray[np.uint8]:
    """Resize and cut one picture; its pixels stay 8-bit.

    Shapes: picture (height, width, 3) RGB
            result (rows * columns, 3 * patch * patch): patches in merge-block order (block row,
            block column, row in block, column in block), pixels in order (channel, py, px)
    """
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    size = (grid.content_width, grid.content_height)
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    patch, merge = spec.patch, spec.merge
    canvas = np.zeros((grid.rows * patch, grid.columns * patch, CHANNELS), np.uint8)
    canvas[: grid.content_height, : grid.content_width] = np.asarray(image)
    blocks = canvas.reshape(
        grid.rows // merge, merge, patch, grid.columns // merge, merge, patch, CHANNELS
    )
    ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(ordered).reshape(grid.rows * grid.columns, CHANNELS * patch * patch)


def normalised(patches: npt.NDArray[np.uint8], spec: PatchSpec) -> npt.NDArray[np.float32]:
    """(x / 255 - mean) / std by table, bit-equal to the reference chain.

    Shapes: patches, result (rows, 3 * patch * patch), one frame
    """
    by_channel = patches.reshape(len(patches), CHANNELS, -1)
    result = np.empty(by_channel.shape, np.float32)
    for channel, levels in enumerate(_levels(spec.mean, spec.std, spec.rescale)):
        result[:, channel] = levels[by_channel[:, channel]]
    return result.reshape(patches.shape)


def pixel_values(patches: npt.NDArray[np.uint8], spec: PatchSpec) -> npt.NDArray[np.float32]:
    """The reference processor's input of the tower: the one frame repeated `temporal` times.

    Shapes: patches (rows, 3 * patch * patch)
            result (rows, 3 * temporal * patch * patch), in order (channel, temporal, py, px)
    """
    frame = normalised(patches, spec).reshape(len(patches), CHANNELS, 1, -1)
    return np.repeat(frame, spec.temporal, axis=2).reshape(len(patches), -1)


@lru_cache(maxsize=8)
def _levels(
    mean: tuple[float, ...], std: tuple[float, ...], rescale: float
) -> npt.NDArray[np.float32]:
    """What each of 256 levels becomes, by channel; rounded where the reference rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    shift, scale = (np.asarray(part, np.float32)[:, None] for part in (mean, std))
    levels: npt.NDArray[np.float32] = (scaled - shift) / scale
    return levels


def _grid(height: int, width: int, spec: PatchSpec, canvas: tuple[int, int]) -> Grid:
    tall, wide = canvas
    scale = min(tall / height, wide / width)
    if not _is_small(height, width, spec):
        scale = min(1.0, scale)
    rows, columns = tall // spec.patch, wide // spec.patch
    return Grid(
        rows,
        columns,
        max(1, min(tall, math.floor(height * scale))),
        max(1, min(wide, math.floor(width * scale))),
        rows * columns // spec.merge**2,
    )


def _canvas(height: int, width: int, spec: PatchSpec, budget: int) -> tuple[int, int]:
    """The reference's canvas of at most `budget` tokens; each expression is written as there."""
    unit = spec.patch * spec.merge
    tall, wide = _up(height, unit), _up(width, unit)
    if spec.temporal * tall * wide < _pixels(spec.min_tokens, spec):
        tall, wide = (_up(side, unit) for side in _enlarged(height, width, spec))
    if spec.temporal * tall * wide <= _pixels(budget, spec):
        return tall, wide
    return _largest(height, width, spec, budget, height)


def _canvas_for_low(height: int, width: int, spec: PatchSpec) -> tuple[int, int]:
    """The smallest budget; unlike the reference's search, this one lets small pictures grow."""
    unit = spec.patch * spec.merge
    tallest = height
    if _is_small(height, width, spec):
        tallest, wide = _enlarged(height, width, spec)
        canvas = _up(tallest, unit), _up(wide, unit)
        if spec.temporal * canvas[0] * canvas[1] <= _pixels(spec.min_tokens, spec):
            return canvas
    return _largest(height, width, spec, spec.min_tokens, tallest)


def _largest(
    height: int, width: int, spec: PatchSpec, budget: int, tallest: int
) -> tuple[int, int]:
    """Binary search for the content height, up to `tallest`, whose canvas still fits the budget."""
    unit = spec.patch * spec.merge
    best = (unit, unit)
    low, high = 1, tallest
    while low <= high:
        content = (low + high) // 2
        candidate = _up(content, unit), _up(max(1, math.floor(width * content / height)), unit)
        if spec.temporal * candidate[0] * candidate[1] <= _pixels(budget, spec):
            best, low = candidate, content + 1
        else:
            high = content - 1
    return best


def _enlarged(height: int, width: int, spec: PatchSpec) -> tuple[int, int]:
    scale = math.sqrt(_pixels(spec.min_tokens, spec) / (spec.temporal * height * width))
    return max(1, math.ceil(height * scale)), max(1, math.ceil(width * scale))


def _is_small(height: int, width: int, spec: PatchSpec) -> bool:
    """Below the smallest budget: the one case in which a picture is enlarged."""
    return spec.temporal * height * width < _pixels(spec.min_tokens, spec)


def _pixels(tokens: int, spec: PatchSpec) -> int:
    """A budget as the reference counts it: pixels of all temporal slots."""
    return tokens * spec.temporal * (spec.patch * spec.merge) ** 2


def _up(side: int, unit: int) -> int:
    return math.ceil(side / unit) * unit

"""Image bytes -> RGB array, within pixel limits."""

from __future__ import annotations

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, WebPImagePlugin

from engine.errors import OutOfMemory, RequestError
from vision.containers import Format, Header, damaged, pixel_stream, read_container

__all__ = ["MAX_ASPECT", "MAX_PIXELS", "Format", "Header", "decode", "open_upright", "read_header"]

MAX_PIXELS: Final = 89_478_485  # also the library's own limit, which stays on (O51)
MAX_ASPECT: Final = 200
WHITE: Final = (255, 255, 255)

# What a decoder may raise over a bad file; anything else is our own bug.
_DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, EOFError,
    struct.error, zlib.error,
)  # fmt: skip
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
# The library knows three of our four formats from the start; for a fourth it would load them all,
# those that call other programs too.
WebPImagePlugin.SUPPORTED  # noqa: B018 # imported to be registered


def read_header(data: bytes, *, pixels: int = MAX_PIXELS, aspect: int = MAX_ASPECT) -> Header:
    """Format and size from the bytes alone, held to the limits; takes no pixel memory (O51).

    Raises:
        RequestError: `invalid_image`, `unsupported_image_format`, `image_too_large` or
            `image_aspect_ratio`.
    """
    header = read_container(data)
    width, height = header.width, header.height
    if width < 1 or height < 1:
        raise damaged(f"says it is {width} x {height} pixels")
    if width * height > pixels:
        raise _too_large(width, height, pixels)
    if max(width, height) > aspect * min(width, height):
        raise RequestError(
            f"the picture is {width} x {height} pixels; the long side may be at most {aspect} "
            "times the short side.",
            code="image_aspect_ratio",
        )
    return header


def decode(data: bytes, header: Header) -> npt.NDArray[np.uint8]:
    """The first frame as the eye sees it, upright and over white.

    Shapes: result (height, width, 3) uint8, RGB
    Raises: RequestError `invalid_image`; OutOfMemory
    """
    return np.asarray(open_upright(data, header))


def open_upright(data: bytes, header: Header) -> Image.Image:
    """As `decode`, in the library's own image, which saves a copy of a large picture."""
    with _damage_is_a_request_error(header):
        stream = pixel_stream(data, header)
        image: Image.Image = Image.open(BytesIO(stream), formats=(header.format,))
        if image.size != header.stored:
            raise damaged(
                f"was announced as {header.stored[0]} x {header.stored[1]} pixels, but holds "
                f"{image.size[0]} x {image.size[1]}"
            )
        image.load()
        rgb = _sixteen_bit(image, stream) if header.depth == 16 else _over_white(image, header)
        turn = _TURNS.get(header.orientation)
        return rgb if turn is None else rgb.transpose(turn)


@contextmanager
def _damage_is_a_request_error(header: Header) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except _BOMB as bomb:
        raise _too_large(header.width, header.height, MAX_PIXELS) from bomb
    except MemoryError as full:
        raise OutOfMemory(
            f"no memory for a picture of {header.width} x {header.height} pixels."
        ) from full
    except _DAMAGE as cause:  # the library's words may quote the file: not passed on
        raise damaged("is damaged or cut short") from cause


def _too_large(width: int, height: int, limit: int) -> RequestError:
    return RequestError(
        f"the picture has {width * height} pixels ({width} x {height}); the limit is {limit}.",
        code="image_too_large",
    )


def _over_white(image: Image.Image, header: Header) -> Image.Image:
    """8-bit RGB; whatever is see-through, or outside a GIF's first frame, is white."""
    if image.mode == "P" and image.palette is None:
        raise damaged("needs a palette and has none")
    key = image.info.get("transparency")
    if image.mode in ("1", "L") and isinstance(key, int) and header.depth < 8:
        # The key is in stored levels, the pixels were spread over 0 to 255.
        image.info["transparency"] = key * 255 // ((1 << header.depth) - 1)
    if not image.has_transparency_data:
        rgb = _as(image, "RGB")
    else:
        rgba = _as(image, "RGBA")
        rgb = Image.new("RGB", image.size, WHITE)
        rgb.paste(rgba, mask=rgba)
    if header.frame is None or header.frame == (0, 0, *image.size):
        return rgb
    canvas = Image.new("RGB", image.size, WHITE)
    canvas.paste(rgb.crop(header.frame), header.frame[:2])
    return canvas


def _as(image: Image.Image, mode: str) -> Image.Image:
    """`convert`, which would copy a large picture even when there is nothing to convert."""
    return image if image.mode == mode else image.convert(mode)


def _sixteen_bit(image: Image.Image, stream: bytes) -> Image.Image:
    """16-bit PNG -> 8-bit RGB: values divided by 257 and rounded, over white.

    The library keeps the high byte only, but can be told that the file is little-endian: then it
    keeps what is really the low byte.
    """
    key = image.info.get("transparency")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.uint16)[..., None]
        high, low = (values >> 8).astype(np.uint8), (values & 0xFF).astype(np.uint8)
    else:
        high = low = np.asarray(image)
        with Image.open(BytesIO(stream), formats=("PNG",)) as again:
            (tile,) = again.tile
            if str(tile.args) in ("RGB;16B", "RGBA;16B"):
                again.tile = [tile._replace(args=str(tile.args).replace("16B", "16L"))]
                low = np.asarray(again)
    level = _by_257(high, low)
    colour = np.broadcast_to(level[..., :3], (*level.shape[:2], 3))
    if level.shape[2] == 4:
        alpha = level[..., 3]
    elif key is not None:  # one colour, in 16-bit levels, is clear
        parts = np.atleast_1d(np.asarray(key))
        clear = ((high == parts >> 8) & (low == (parts & 0xFF))).all(axis=2)
        alpha = np.where(clear, np.uint8(0), np.uint8(255))
    else:
        return Image.fromarray(np.ascontiguousarray(colour))
    canvas = Image.new("RGB", image.size, WHITE)
    canvas.paste(Image.fromarray(np.ascontiguousarray(colour)), mask=Image.fromarray(alpha))
    return canvas


def _by_257(high: npt.NDArray[np.uint8], low: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """round((256 high + low) / 257) = high + round((low - high) / 257), in bands of rows.

    Bands keep the wider numbers small beside the picture.
    """
    level = high.copy()
    for top in range(0, len(high), 64):
        rows = slice(top, top + 64)
        step = low[rows].astype(np.int16) - high[rows]
        level[rows] += (step > 128).view(np.uint8)
        level[rows] -= (step < -128).view(np.uint8)
    return level

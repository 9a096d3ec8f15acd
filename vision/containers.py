"""PNG, JPEG, GIF and WebP as bytes: size and orientation before any pixel; the bare pixel stream.

Nothing here decodes, and nothing grows beyond a second copy of the bytes. The walks are bounded, so
that a file made of empty chunks costs no time either.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.errors import RequestError

Format = Literal["PNG", "JPEG", "GIF", "WEBP"]

MAX_PARTS = 65_536  # chunks, segments or blocks that a file may have; real ones have thousands
MAX_SCANS = 64  # of a progressive JPEG; each one goes over all pixels, encoders write about 10

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a length
_APP0, _APP1, _APP14, _COMMENT, _SCAN, _END = 0xE0, 0xE1, 0xEE, 0xFE, 0xDA, 0xD9


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its picture. Units: pixels; width and height as seen, upright."""

    format: Format
    width: int
    height: int
    orientation: int = 1  # EXIF, 1 to 8; from 5 on the stored picture lies on its side
    depth: int = 8  # bits a channel as stored
    frame: tuple[int, int, int, int] | None = None  # GIF: left, top, right, bottom of the first one

    @property
    def stored(self) -> tuple[int, int]:
        """Width and height as the decoder will give them, before the orientation is applied."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)


def read_container(data: bytes) -> Header:
    """Format, size and orientation, from the bytes alone.

    Raises:
        RequestError: `unsupported_image_format` or `invalid_image` (O52).
    """
    if not data:
        raise damaged("is empty")
    try:
        if data.startswith(PNG_SIGNATURE):
            return _read_png(data)
        if data.startswith(b"\xff\xd8"):
            return _read_jpeg(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _read_gif(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _read_webp(data)
    except (struct.error, IndexError) as cut:
        raise damaged("is cut short") from cut
    raise RequestError(
        "the picture is none of PNG, JPEG, GIF and WebP.", code="unsupported_image_format"
    )


def pixel_stream(data: bytes, header: Header) -> bytes:
    """The file without what nobody needs: text, profiles, EXIF, comments, later animation control.

    The decoder never sees side data, so none of it can fail, grow or turn the picture (O53).
    """
    match header.format:
        case "PNG":
            kept = [data[a:b] for kind, a, b in _png_chunks(data) if kind in _PNG_KEPT]
            return PNG_SIGNATURE + b"".join(kept)
        case "JPEG":
            return b"\xff\xd8" + b"".join(data[a:b] for a, b in _jpeg_kept(data))
        case "GIF":
            palette, control, image = _gif_parts(data)
            return data[:palette] + data[control[0] : control[1]] + data[image:]
        case "WEBP":
            return data


def damaged(how: str) -> RequestError:
    """The refusal of O52 for files that cannot be read."""
    return RequestError(f"the picture {how}.", code="invalid_image")


def exif_orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, 1 to 8; 1 when it has none or cannot be read."""
    while exif.startswith(b"Exif\0\0"):  # some writers put the identifier there twice
        exif = exif[6:]
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * entries, 12):
            tag, kind, count = struct.unpack_from(order + "HHI", exif, entry)
            if tag == 0x0112 and kind in (3, 4) and count == 1:
                (value,) = struct.unpack_from(order + ("H" if kind == 3 else "I"), exif, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _upright(kind: Format, stored: tuple[int, int], orientation: int, *, depth: int = 8) -> Header:
    width, height = stored if orientation < 5 else stored[::-1]
    return Header(kind, width, height, orientation, depth)


def _read_png(data: bytes) -> Header:
    length, kind, width, height, depth = struct.unpack_from(">I4sIIB", data, 8)
    (crc,) = struct.unpack_from(">I", data, 29)
    if length != 13 or kind != b"IHDR" or crc != zlib.crc32(data[12:29]):
        raise damaged("has a damaged header")
    orientation = 1
    for name, start, end in _png_chunks(data):
        if name == b"eXIf":
            orientation = exif_orientation(data[start + 8 : end - 4])
            break
    return _upright("PNG", (width, height), orientation, depth=depth)


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Type, start and end of each chunk; the last one may be cut."""
    at = len(PNG_SIGNATURE)
    for _ in range(MAX_PARTS):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, at, at + 12 + length
        if kind == b"IEND":
            return
        at += 12 + length
    raise damaged(f"has more than {MAX_PARTS} chunks")


def _read_jpeg(data: bytes) -> Header:
    size, depth, orientation = None, 8, 1
    for marker, start, end in _jpeg_segments(data):
        if marker in _JPEG_SIZES:
            if size is not None:
                raise damaged("has two frame headers")
            depth, height, width = struct.unpack_from(">BHH", data, start + 4)
            size = (width, height)
        elif marker == _APP1 and orientation == 1 and data[start + 4 : start + 8] == b"Exif":
            orientation = exif_orientation(data[start + 4 : end])
    if size is None:
        raise damaged("has no frame header")
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise damaged(f"has more than {MAX_SCANS} scans")
    return _upright("JPEG", size, orientation, depth=depth)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment in front of the first scan, and of the scan itself."""
    at = 2
    for _ in range(MAX_PARTS):
        at = data.find(b"\xff", at)  # decoders skip stray bytes between segments
        if at < 0 or at + 2 > len(data):
            return
        marker = data[at + 1]
        if marker == 0xFF:  # fill bytes
            at += 1
        elif marker == 0x00 or marker in _JPEG_BARE:
            at += 2
        elif marker == _END:
            return
        else:
            (length,) = struct.unpack_from(">H", data, at + 2)
            if marker == _SCAN:
                yield marker, at, len(data)
                return
            yield marker, at, at + 2 + length
            at += 2 + max(length, 2)
    raise damaged(f"has more than {MAX_PARTS} segments")


def _jpeg_kept(data: bytes) -> Iterator[tuple[int, int]]:
    """All but application segments and comments; JFIF and Adobe say how colours are stored."""
    for marker, start, end in _jpeg_segments(data):
        is_side_data = _APP0 < marker <= 0xEF and marker != _APP14
        if not is_side_data and marker != _COMMENT:
            yield start, end


def _read_gif(data: bytes) -> Header:
    screen = struct.unpack_from("<HH", data, 6)
    _, _, image = _gif_parts(data)
    left, top, width, height = struct.unpack_from("<HHHH", data, image + 1)
    if not (width and height):
        raise damaged("has an empty first frame")
    canvas = max(screen[0], left + width), max(screen[1], top + height)
    return Header("GIF", *canvas, frame=(left, top, left + width, top + height))


def _gif_parts(data: bytes) -> tuple[int, tuple[int, int], int]:
    """End of the palette, control block of the first frame (may be empty), start of the frame."""
    flags = data[10]
    palette = at = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
    control = (at, at)
    parts = 0
    while data[at] == 0x21:  # extensions: control, comment, text, application
        start, label = at, data[at + 1]
        at += 2
        while data[at]:
            at += 1 + data[at]
            parts += 1
            if parts > MAX_PARTS:
                raise damaged(f"has more than {MAX_PARTS} blocks before its first frame")
        at += 1
        if label == 0xF9:
            control = (start, at)
    if data[at] != 0x2C:
        raise damaged("has no frame")
    return palette, control, at


def _read_webp(data: bytes) -> Header:
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(_exactly(data, 24, 3), "little") + 1
        height = int.from_bytes(_exactly(data, 27, 3), "little") + 1
    elif kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise damaged("has a damaged header")
    orientation = 1
    at = 12
    for _ in range(MAX_PARTS):
        if at + 8 > len(data):
            return _upright("WEBP", (width, height), orientation)
        name, length = struct.unpack_from("<4sI", data, at)
        if name == b"EXIF":
            orientation = exif_orientation(data[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    raise damaged(f"has more than {MAX_PARTS} chunks")


def _exactly(data: bytes, start: int, count: int) -> bytes:
    part = data[start : start + count]
    if len(part) < count:
        raise IndexError(start)
    return part

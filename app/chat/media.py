"""Image parts -> patches, within size, count and time limits: planned first, decoded after.

    plan        data URL -> bytes -> header -> grid: the token price, before any pixel memory
    (the caller checks the context)
    decode      pixels -> patches, in a bounded pool, with a time limit a picture

Pictures by URL are off: only data URLs are read (O58).
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import unquote_to_bytes

import msgspec

from app.config import Limits
from engine.errors import RequestError
from engine.messages import PatchSpec, Picture
from vision.images import Header, open_upright, read_header
from vision.preprocess import Detail, Grid, cut, named_detail, plan_grid

T = TypeVar("T")

PICTURE_TIME_S: Final = 10.0  # from the start of its decoding (O54)
REQUEST_PIXELS: Final = 4  # times the limit of one picture (O50)

_WHITE_SPACE: Final = b" \t\r\n\f\v"
_BLANKS: Final = _WHITE_SPACE.decode() + "="
PIECE_BYTES: Final = 1024 * 1024  # of one call; whole groups of four base64 characters
# What encoders escape in base64; replacing these needs no memory, whatever the text holds.
_ESCAPES: Final = (
    (b"%2B", b"+"), (b"%2b", b"+"), (b"%2F", b"/"), (b"%2f", b"/"), (b"%3D", b"="), (b"%3d", b"="),
    (b"%0A", b""), (b"%0a", b""), (b"%0D", b""), (b"%0d", b""), (b"%20", b""),
)  # fmt: skip
_MAX_OTHER_ESCAPES: Final = 65_536
_WANTED: Final = "send a data URL: data:image/png;base64,..."


@dataclass(frozen=True, slots=True)
class ImagePart:
    """One image part of a message, as the client sent it; `param` is `messages[i].content[j]`."""

    url: str = field(repr=False)
    detail: str | None
    param: str


@dataclass(frozen=True, slots=True)
class PlannedPicture:
    """What is known of a picture before it is decoded."""

    data: bytes = field(repr=False)
    header: Header
    grid: Grid
    detail: Detail
    spec: PatchSpec
    param: str

    @property
    def tokens(self) -> int:
        """Prompt rows that the picture takes."""
        return self.grid.tokens


@dataclass(frozen=True, slots=True)
class CutPicture:
    """A decoded picture, cut into patches (see `Picture` for the layout)."""

    patches: bytes = field(repr=False)
    grid: tuple[int, int, int]
    tokens: int
    digest: str

    def at(self, position: int) -> Picture:
        """The picture with its first placeholder at this prompt position."""
        return Picture(self.patches, self.grid, position, self.tokens, self.digest)


class DecodePool:
    """A bounded number of threads for work that would hold up the event loop (O54).

    A thread cannot be stopped: after the time limit its place stays taken until it comes back,
    which the pixel limit bounds.
    """

    def __init__(self, workers: int, limit_s: float = PICTURE_TIME_S) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="picture")
        self._places = asyncio.Semaphore(workers)
        self._limit_s = limit_s

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work in a thread. Raises `TimeoutError`; waiting for a place does not count."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        task: Future[T] = self._threads.submit(work)

        def give_back(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._places.release)

        task.add_done_callback(give_back)
        return await asyncio.wait_for(asyncio.wrap_future(task), self._limit_s)

    def close(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def plan(parts: Sequence[ImagePart], spec: PatchSpec, limits: Limits) -> list[PlannedPicture]:
    """Everything that can be refused or priced without pixels (O28, O48 to O52, rules 31 and 32).

    Raises:
        RequestError: naming the part, with the code of O50 to O52, O55 or O58.
    """
    if len(parts) > limits.images:
        raise RequestError(
            f"the request has {len(parts)} images; the limit is {limits.images}.",
            code="too_many_images",
            param=parts[limits.images].param,
        )
    planned = []
    pixels = 0
    for part in parts:
        try:
            detail = named_detail(part.detail)
        except RequestError as unknown:
            raise _placed(unknown, f"{part.param}.image_url.detail") from unknown
        try:
            data = read_data_url(part.url, limits.image_bytes)
            header = read_header(data, pixels=limits.pixels, aspect=limits.aspect)
            pixels += header.width * header.height
            _within_request(pixels, REQUEST_PIXELS * limits.pixels)
        except RequestError as refused:
            raise _placed(refused, part.param) from refused
        grid = plan_grid(header.height, header.width, spec, detail)
        planned.append(PlannedPicture(data, header, grid, detail, spec, part.param))
    return planned


async def decode(planned: Sequence[PlannedPicture], pool: DecodePool) -> list[CutPicture]:
    """Pixels and patches of planned pictures, in their order, off the event loop.

    Raises:
        RequestError: `invalid_image` for damaged data, or when a picture takes too long.
    """
    tasks = [asyncio.ensure_future(_decode_one(picture, pool)) for picture in planned]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def cut_picture(planned: PlannedPicture) -> CutPicture:
    """Decode, resize and cut one picture; a second or so for the largest."""
    patches = cut(open_upright(planned.data, planned.header), planned.spec, planned.grid).tobytes()
    return CutPicture(patches, planned.grid.thw, planned.tokens, digest(planned, patches))


def digest(planned: PlannedPicture, patches: bytes) -> str:
    """SHA-256 over the processed pixels and all that shapes them (O59)."""
    shape = (planned.spec, planned.detail, planned.grid.thw)
    return hashlib.sha256(msgspec.json.encode(shape) + b"\0" + patches).hexdigest()


def read_data_url(url: str, limit: int) -> bytes:
    """The bytes of a data URL (O49); nothing is opened, fetched or looked up for any other.

    Raises:
        RequestError: `invalid_image_url`, `image_url_not_allowed` (http and https are off), or
            `image_too_large` above `limit` bytes, before they are decoded.
    """
    text = url.strip()
    scheme = text[:8].lower()
    if scheme.startswith(("http://", "https://")):
        raise RequestError(
            f"pictures are not fetched by this server; {_WANTED}", code="image_url_not_allowed"
        )
    if not scheme.startswith("data:"):
        raise _bad_url(f"the image URL is not a data URL; {_WANTED}")
    comma = text.find(",")
    head = text[: max(comma, 0)]
    if comma < 0 or not head.replace(" ", "").lower().endswith(";base64"):
        raise _bad_url(f"the data URL is not marked as base64; {_WANTED}")
    # Counted before anything is copied: what cannot be data is at most this much of the text. No
    # one call goes over more of it than needed, since other threads wait for its end (O14).
    other = 3 * text.count("%") + sum(text.count(blank) for blank in _BLANKS)
    _check_size((len(text) - comma - 1 - other) * 3 // 4, limit)
    try:
        raw = text[comma + 1 :].encode("ascii")
    except UnicodeEncodeError as cause:
        raise _bad_url(f"the data URL does not hold base64; {_WANTED}") from cause
    packed = b"".join(part.translate(None, _WHITE_SPACE) for part in _pieces(_unescaped(raw)))
    packed = packed.rstrip(b"=")
    if b"=" in packed:
        raise _bad_url(f"the data URL does not hold base64; {_WANTED}")
    if not packed:
        raise _bad_url(f"the data URL holds no data; {_WANTED}")
    _check_size(len(packed) * 3 // 4, limit)
    try:
        parts = [
            binascii.a2b_base64(part + b"=" * (-len(part) % 4), strict_mode=True)
            for part in _pieces(packed)
        ]
    except binascii.Error as cause:
        raise _bad_url(f"the data URL does not hold base64; {_WANTED}") from cause
    return b"".join(parts)


async def _decode_one(picture: PlannedPicture, pool: DecodePool) -> CutPicture:
    try:
        return await pool.run(lambda: cut_picture(picture))
    except TimeoutError as late:
        raise RequestError(
            f"{picture.param}: the picture could not be decoded within {PICTURE_TIME_S:g} s.",
            code="invalid_image",
            param=picture.param,
        ) from late
    except RequestError as refused:
        raise _placed(refused, picture.param) from refused


def _pieces(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _unescaped(raw: bytes) -> bytes:
    if b"%" not in raw:
        return raw
    for escape, plain in _ESCAPES:
        raw = raw.replace(escape, plain)
    if raw.count(b"%") > _MAX_OTHER_ESCAPES:
        raise _bad_url(f"the data URL is percent-encoded beyond need; {_WANTED}")
    return unquote_to_bytes(raw)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise RequestError(
            f"the picture has {size} bytes or more; the limit is {limit}.", code="image_too_large"
        )


def _within_request(pixels: int, limit: int) -> None:
    if pixels > limit:
        raise RequestError(
            f"the request's pictures have {pixels} pixels so far; the limit is {limit} for all.",
            code="image_too_large",
        )


def _bad_url(message: str) -> RequestError:
    return RequestError(message, code="invalid_image_url")


def _placed(error: RequestError, param: str) -> RequestError:
    """The same refusal, naming the part."""
    return RequestError(f"{param}: {error}", code=error.code, param=param)

"""Any file becomes the upright RGB picture that the eye sees, or a refusal with its code."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from engine.errors import RequestError
from tests.vision.pictures import (
    FILES,
    FOLDER,
    URLS,
    Entry,
    assert_shows,
    chunk,
    png,
    raw_png,
    saved,
)
from vision.containers import MAX_PARTS, MAX_SCANS, exif_orientation
from vision.images import MAX_PIXELS, decode, read_header

QUARTERS = np.zeros((32, 48, 3), np.uint8)
QUARTERS[:16, :24], QUARTERS[:16, 24:] = (220, 30, 30), (30, 180, 60)
QUARTERS[16:, :24], QUARTERS[16:, 24:] = (40, 60, 210), (240, 220, 40)


def see(data: bytes) -> npt.NDArray[np.uint8]:
    return decode(data, read_header(data))


def outcome(data: bytes) -> npt.NDArray[np.uint8] | RequestError:
    """The picture, or the refusal; any other error is the test's to show."""
    try:
        return see(data)
    except RequestError as refused:
        return refused


@pytest.mark.parametrize("entry", FILES, ids=str)
def test_each_odd_file_comes_out_as_the_manifest_says(entry: Entry) -> None:
    """B-001 to B-023, O50 to O53: pixels within tolerance, or the listed code; no other error."""
    began = perf_counter()
    came = outcome(entry.data)

    assert perf_counter() - began < 2.0
    if isinstance(came, RequestError):
        assert entry.decision != "accept", came
        assert came.code == (entry.code or "invalid_image")
        assert len(str(came)) < 300
    else:
        assert entry.decision != "refuse"
        if entry.decision == "accept":
            assert_shows(came, entry)


def test_the_manifest_is_whole() -> None:
    """63 picture files are read here, 15 URLs by the media tests."""
    assert (len(FILES), len(URLS)) == (63, 15)


def test_the_header_alone_gives_the_upright_size() -> None:
    """O51, O53: tokens are planned for the picture as it will be seen, not as it is stored."""
    header = read_header((FOLDER / "exif_6.jpg").read_bytes())

    assert (header.width, header.height) == (48, 32)
    assert header.stored == (32, 48)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_in_every_container(kind: str, orientation: int) -> None:
    """O53: all eight orientations, in each container that can carry one."""
    turns = {
        1: lambda x: x,
        2: np.fliplr,
        3: lambda x: np.rot90(x, 2),
        4: np.flipud,
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: np.rot90(x, 2).swapaxes(0, 1),
        8: lambda x: np.rot90(x, 3),
    }
    stored = np.ascontiguousarray(turns[orientation](QUARTERS))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}

    seen = see(saved(Image.fromarray(stored), kind, exif=exif.tobytes(), **options))

    assert seen.shape == QUARTERS.shape
    for y, x in ((8, 12), (8, 35), (23, 12), (23, 35)):
        assert np.abs(seen[y, x].astype(int) - QUARTERS[y, x]).max() <= 14


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"MM\0*",
        b"MM\0*\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\x02\0\0\0\x06\0\0\0",
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0",
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\0\0\0",
    ],
)
def test_an_unreadable_orientation_is_upright(exif: bytes) -> None:
    """O53, B-009: broken EXIF never costs the picture."""
    assert exif_orientation(exif) == 1


def test_outside_the_first_frame_of_a_gif_lies_white() -> None:
    """O53: whatever is see-through is white, and nothing was drawn there."""
    seen = see((FOLDER / "gif_offset.gif").read_bytes())

    assert tuple(seen[0, 0]) == (255, 255, 255)
    assert tuple(seen[20, 20]) != (255, 255, 255)


def test_sixteen_bit_colour_is_divided_by_257_and_rounded() -> None:
    """O53, B-002: not cut to its high byte, which is wrong by one level for half of all values."""
    values = np.arange(0, 65_536, 64, dtype=np.uint16).reshape(16, 64)
    rgb = np.stack([values, values[::-1], values[:, ::-1]], axis=2)
    data = raw_png(64, 16, 16, 2, rgb.astype(">u2").tobytes())

    assert np.array_equal(see(data), np.rint(rgb / 257).astype(np.uint8))


def test_sixteen_bit_grey_is_divided_by_257_and_rounded() -> None:
    """O53, B-002."""
    values = np.arange(0, 65_536, 64, dtype=np.uint16).reshape(16, 64)
    data = raw_png(64, 16, 16, 0, values.astype(">u2").tobytes())

    assert np.array_equal(see(data)[..., 1], np.rint(values / 257).astype(np.uint8))


def test_sixteen_bit_alpha_lies_on_white() -> None:
    """O53: half see-through red."""
    rgba = np.broadcast_to(np.array([65_535, 0, 0, 32_768], np.uint16), (4, 4, 4))
    seen = see(raw_png(4, 4, 16, 6, rgba.astype(">u2").tobytes()))

    assert np.abs(seen[2, 2].astype(int) - (255, 127, 127)).max() <= 1


@pytest.mark.parametrize(("depth", "key"), [(1, 1), (2, 2), (4, 9), (8, 200), (16, 40_000)])
def test_a_grey_level_declared_clear_is_white_at_every_depth(depth: int, key: int) -> None:
    """O53: the key is in stored levels, the decoder spreads pixels over 0 to 255."""
    other = key - 1
    if depth == 16:
        row = struct.pack(">8H", *[key] * 4, *[other] * 4)
    else:
        bits = "".join(f"{level:0{depth}b}" for level in [key] * 4 + [other] * 4)
        row = int(bits, 2).to_bytes(depth, "big")
    seen = see(raw_png(8, 2, depth, 0, row * 2, chunk(b"tRNS", struct.pack(">H", key))))

    assert tuple(seen[0, 0]) == (255, 255, 255)
    assert seen[0, 7, 0] == np.rint(other * 255 / ((1 << depth) - 1))


def test_a_colour_declared_clear_is_white() -> None:
    """O53, for 8 and 16 bits a channel."""
    for depth, kind in ((8, ">u1"), (16, ">u2")):
        rgb = np.zeros((2, 8, 3), np.uint16)
        rgb[:, :4] = (7, 8, 9)
        key = chunk(b"tRNS", struct.pack(">HHH", 7, 8, 9))
        seen = see(raw_png(8, 2, depth, 2, rgb.astype(kind).tobytes(), key))

        assert tuple(seen[1, 0]) == (255, 255, 255)
        assert tuple(seen[1, 7]) == (0, 0, 0)


def test_a_palette_picture_without_a_palette_is_refused() -> None:
    """O52: the library would stop at an assertion of its own."""
    with pytest.raises(RequestError, match="palette") as refused:
        see(raw_png(4, 4, 8, 3, bytes(16)))
    assert refused.value.code == "invalid_image"


def test_only_the_first_frame_of_an_animated_webp_is_seen() -> None:
    """O53."""
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    data = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)

    assert tuple(see(data)[5, 5]) == (255, 0, 0)


def test_text_that_grows_never_reaches_the_decoder() -> None:
    """O53, B-016: side data is left out, so it can neither fail nor take memory."""
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(50_000_000), 9))
    data = raw_png(4, 4, 8, 2, bytes(48), *[bomb] * 20)

    assert see(data).shape == (4, 4, 3)


def test_a_decoded_size_that_differs_from_the_announced_one_is_refused() -> None:
    """Rule 31: the decoder is capped to the announced size."""
    small, large = png(np.zeros((4, 4, 3), np.uint8)), png(np.zeros((64, 64, 3), np.uint8))

    with pytest.raises(RequestError, match="announced as 4 x 4") as refused:
        decode(large, read_header(small))

    assert refused.value.code == "invalid_image"


def test_more_pixels_than_the_limit_are_refused_by_the_header() -> None:
    """O50: by header; the limit itself passes, one row more does not."""
    header = struct.pack(">IIBBBBB", 10_000, 8_947, 8, 2, 0, 0, 0)
    over = struct.pack(">IIBBBBB", 9_460, 9_460, 8, 2, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"

    assert read_header(signature + chunk(b"IHDR", header)).height == 8_947
    with pytest.raises(RequestError, match="the limit is 89478485") as refused:
        read_header(signature + chunk(b"IHDR", over))
    assert refused.value.code == "image_too_large"


def test_a_28_byte_header_of_100000_by_100000_is_refused() -> None:
    """O51, rule 31."""
    data = b"RIFF" + struct.pack("<I", 20) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4)
    data += (99_999).to_bytes(3, "little") * 2

    with pytest.raises(RequestError) as refused:
        read_header(data)
    assert refused.value.code == "image_too_large"


def test_the_librarys_own_limit_stays_on_and_its_warning_is_an_error() -> None:
    """O51: a second wall behind ours, never switched off."""
    assert Image.MAX_IMAGE_PIXELS == MAX_PIXELS
    code = (
        "import vision.images as i, warnings; from PIL import Image\n"
        "try: warnings.warn('x', Image.DecompressionBombWarning)\n"
        "except Image.DecompressionBombWarning: print('error')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "error\n"


def test_no_reader_of_another_format_is_even_loaded(tmp_path: Path) -> None:
    """O52, B-022: the allow-list is given by name, so nothing that calls a program is in reach."""
    code = (
        "import sys; from pathlib import Path; from engine.errors import RequestError\n"
        "from vision.images import *\n"
        "for name in sys.argv[1:]:\n"
        "    data = Path(name).read_bytes()\n"
        "    try: decode(data, read_header(data))\n"
        "    except RequestError: pass\n"
        "print(sorted(m[4:-11] for m in sys.modules if m.endswith('ImagePlugin')))"
    )
    names = ("control.webp", "cut_half.png", "short_idat.png", "doc.pdf", "plain.svg", "anim3.gif")
    files = [str(FOLDER / name) for name in names]
    odd = tmp_path / "odd.png"  # its header reads well, but there is no colour type 5
    odd.write_bytes(raw_png(4, 4, 8, 5, bytes(16)))
    files.append(str(odd))
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(["Bmp", "Gif", "Jpeg", "Png", "Ppm", "WebP"])


def test_a_header_that_fails_its_checksum_is_refused_before_it_is_believed() -> None:
    """B-018: the size in it may be what was damaged."""
    with pytest.raises(RequestError) as refused:
        read_header((FOLDER / "bad_ihdr_crc.png").read_bytes())
    assert refused.value.code == "invalid_image"


def test_files_made_of_empty_parts_are_refused_in_time() -> None:
    """O51: a walk over chunks, segments or blocks is bounded."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 2, 0, 0, 0))
    many = 20 * MAX_PARTS
    files = (
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"teXt", b"") * many,
        b"\xff\xd8" + b"\xff\xe1\0\2" * many,
        b"\xff\xd8" + b"\xff" * many,
        b"GIF89a\4\0\4\0\0\0\0" + b"\x21\xfe" + b"\1a" * many,
        b"GIF89a\4\0\4\0\0\0\0" + b"\x21\xfe\0" * many + b"\x3b",
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"EXIF\0\0\0\0" * many,
    )
    for data in files:
        began = perf_counter()
        with pytest.raises(RequestError) as refused:
            read_header(data)
        assert refused.value.code == "invalid_image"
        assert perf_counter() - began < 1.0


def test_a_jpeg_with_endless_scans_is_refused() -> None:
    """O54: each scan goes over all pixels, so their number bounds the time."""
    whole = (FOLDER / "control.jpg").read_bytes()
    scans = b"\xff\xda\0\2" * (MAX_SCANS + 1)

    with pytest.raises(RequestError, match="scans"):
        read_header(whole[:-2] + scans + whole[-2:])


@pytest.mark.parametrize("file", ["control.png", "control.jpg", "control.webp", "anim3.gif"])
def test_a_file_cut_anywhere_is_a_picture_or_invalid_image(file: str) -> None:
    """O52, B-017: no cut gives another error."""
    whole = (FOLDER / file).read_bytes()
    for length in range(len(whole)):
        came = outcome(whole[:length])
        if isinstance(came, RequestError):
            assert came.code in ("invalid_image", "unsupported_image_format"), (length, came)


@pytest.mark.parametrize("file", ["control.png", "control.jpg", "control.webp", "anim3.gif"])
def test_a_file_with_a_damaged_byte_is_a_picture_or_a_refusal(file: str) -> None:
    """O52, B-018: errors of odd types do not slip past."""
    whole = (FOLDER / file).read_bytes()
    random = np.random.default_rng(5)
    for _ in range(300):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 3):
            data[place] = random.integers(0, 256)
        came = outcome(bytes(data))
        assert isinstance(came, RequestError) or came.shape[2] == 3


BOMBS = """
import resource, sys, threading, time
from pathlib import Path
from engine.errors import RequestError
from vision.images import decode, read_header

files = [Path(name).read_bytes() for name in sys.argv[1:]] * 7
slowest, codes = [], []
def look(data):
    began = time.perf_counter()
    try:
        decode(data, read_header(data))
    except RequestError as refused:
        codes.append(refused.code)
    slowest.append(time.perf_counter() - began)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
threads = [threading.Thread(target=look, args=(data,)) for data in files]
[t.start() for t in threads]
[t.join() for t in threads]
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(len(codes), *set(codes), max(slowest) < 2.0, grown < 200)
"""


def test_twenty_bombs_in_parallel_cost_no_memory() -> None:
    """B-015, O51: below 200 MB extra, each within 2 s, all decided from the header."""
    names = [str(FOLDER / f"bomb_{kind}") for kind in ("256mp.png", "header.png", "screen.gif")]

    done = subprocess.run(
        [sys.executable, "-c", BOMBS, *names], capture_output=True, text=True, check=True
    )

    assert done.stdout == "21 image_too_large True True\n"

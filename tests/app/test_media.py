"""Image parts are priced before they are decoded, and refused by name with their code."""

from __future__ import annotations

import asyncio
import base64
import builtins
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from time import perf_counter
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from app.chat.media import (
    PIECE_BYTES,
    CutPicture,
    DecodePool,
    ImagePart,
    cut_picture,
    decode,
    plan,
    read_data_url,
)
from app.config import Limits
from engine.errors import RequestError
from engine.messages import PatchSpec
from tests.vision.pictures import FILES, FOLDER, URLS, Entry, assert_shows, png, saved
from vision.images import decode as see

SPEC = PatchSpec(
    "glm5_next", 8, 2, 2, 49, 81,
    (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip
LIMITS = Limits()
MIB = 1024 * 1024


@pytest.fixture
async def pool() -> AsyncIterator[DecodePool]:
    made = DecodePool(2)
    yield made
    made.close()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def a_part(url: str, detail: str | None = None, number: int = 0) -> ImagePart:
    return ImagePart(url, detail, f"messages[0].content[{number}]")


async def load(parts: Sequence[ImagePart], pool: DecodePool) -> list[CutPicture]:
    """Planned, then decoded, as the prompter does it; both off the loop."""
    return await decode(await pool.run(lambda: plan(parts, SPEC, LIMITS)), pool)


def refusal(url: str, limits: Limits = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as refused:
        plan([a_part(url, number=3)], SPEC, limits)
    assert refused.value.param == "messages[0].content[3]"
    assert str(refused.value).startswith("messages[0].content[3]: ")
    assert len(str(refused.value)) < 300
    return refused.value


# -- data URLs ------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", URLS, ids=str)
def test_each_odd_url_comes_out_as_the_manifest_says(entry: Entry) -> None:
    """B-024 to B-030, O49."""
    url = entry.data.decode()
    if entry.decision == "accept":
        (planned,) = plan([a_part(url)], SPEC, LIMITS)
        assert_shows(see(planned.data, planned.header), entry)
    else:
        assert refusal(url).code == entry.code == "invalid_image_url"


@pytest.mark.parametrize("entry", FILES, ids=str)
async def test_each_odd_file_comes_through_a_data_url_alike(entry: Entry, pool: DecodePool) -> None:
    """B-001 to B-023 as clients send them; the declared type never decides."""
    part = a_part(data_url(entry.data, "application/octet-stream"))
    try:
        (cut,) = await load([part], pool)
    except RequestError as refused:
        came: CutPicture | RequestError = refused
    else:
        came = cut
    if isinstance(came, RequestError):
        assert entry.decision != "accept", came
        # Empty data never gets as far as a picture (B-019, B-028).
        want = "invalid_image_url" if not entry.data else entry.code or "invalid_image"
        assert (came.code, came.param) == (want, part.param)
    else:
        assert entry.decision != "refuse"
        assert len(came.patches) == came.tokens * 4 * 3 * 64


@pytest.mark.parametrize("left_open", ["/etc/hostname", "file:///etc/hostname", "file:///none"])
def test_a_path_is_refused_alike_whether_the_file_exists_or_not(
    left_open: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O49, B-030: nothing is opened."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(builtins, "open", opened)
    assert refusal(left_open).code == "invalid_image_url"
    assert str(refusal(left_open)) == str(refusal("file:///other"))


@pytest.mark.parametrize(
    "url", ["http://example.org/a.png", "HTTPS://example.org/a.png", " http://x"]
)
def test_pictures_by_url_are_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O58, B-035, rule 33: at once, without a name lookup, and the message says what works."""

    def looked_up(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    refused = refusal(url)
    assert refused.code == "image_url_not_allowed"
    assert "data URL" in str(refused)


def test_base64_that_is_percent_encoded_beyond_need_is_read_or_refused_in_bounds() -> None:
    """O49, B-027: escapes are undone; a body of nothing but escapes takes no memory."""
    data = (FOLDER / "control.png").read_bytes()
    packed = base64.b64encode(data).decode()
    everything = "".join(f"%{ord(letter):02X}" for letter in packed)

    assert read_data_url("data:;base64," + quote(packed, safe=""), 100_000) == data
    assert read_data_url("data:;base64," + everything, 100_000) == data
    assert refusal("data:;base64," + "%41" * 5_000_000).code == "invalid_image_url"


@pytest.mark.parametrize("line", [76, PIECE_BYTES - 1])
def test_large_data_is_the_same_wherever_its_pieces_end(line: int) -> None:
    """O14, O49: a call goes over one piece; blanks shift the groups of four across the borders."""
    data = bytes(range(256)) * 13_000
    packed = base64.b64encode(data).decode()
    lines = "\n".join(packed[at : at + line] for at in range(0, len(packed), line))
    assert read_data_url("data:;base64," + lines, len(data)) == data
    with pytest.raises(RequestError, match="bytes or more"):
        read_data_url("data:;base64," + lines, len(data) - 1_000)


def test_padding_at_the_end_of_a_piece_is_no_padding() -> None:
    """O49: it stands at the end of the data or nowhere."""
    piece = "A" * (PIECE_BYTES - 1) + "="
    assert refusal(f"data:;base64,{piece}AAAA").code == "invalid_image_url"
    assert len(read_data_url(f"data:;base64,{piece}", PIECE_BYTES)) == PIECE_BYTES // 4 * 3 - 1


@pytest.mark.parametrize("body", ["AAAAA", "AA=AA", "A", "AA-_", "ÄÄÄÄ", "====", "AAAA,AAAA"])
def test_what_is_not_base64_is_refused(body: str) -> None:
    """O49, B-028."""
    assert refusal("data:image/png;base64," + body).code == "invalid_image_url"


def test_a_media_type_in_any_case_will_do() -> None:
    """O49: RFC 2397 names are without case."""
    data = (FOLDER / "control.png").read_bytes()
    packed = base64.b64encode(data).decode()

    assert read_data_url(f"DATA:Image/PNG;charset=x;BASE64,{packed}", MIB) == data


# -- limits ---------------------------------------------------------------------------------


def test_too_many_images_are_refused_by_counting() -> None:
    """O50, B-042: N passes, N + 1 does not, and 200 are answered as fast, whatever they hold."""
    url = data_url((FOLDER / "solid_red.png").read_bytes())

    assert len(plan([a_part(url, number=n) for n in range(16)], SPEC, LIMITS)) == 16
    for count in (17, 200):
        parts = [a_part("never read", number=n) for n in range(count)]
        with pytest.raises(RequestError, match="the limit is 16") as refused:
            plan(parts, SPEC, LIMITS)
        assert refused.value.code == "too_many_images"
        assert refused.value.param == "messages[0].content[16]"


def test_more_bytes_than_the_limit_are_refused_before_they_are_decoded() -> None:
    """O50: 20 MiB raw; the picture itself is fine."""
    data = (FOLDER / "control.png").read_bytes()
    padded = data + bytes(20 * MIB + 1 - len(data))

    assert refusal(data_url(padded)).code == "image_too_large"
    assert plan([a_part(data_url(padded[:-1]))], SPEC, LIMITS)


def test_the_pixels_of_a_request_are_bounded_too() -> None:
    """O50: four times the limit of one picture, over all of them."""
    url = data_url(png(np.zeros((40, 50, 3), np.uint8)))  # 2,000 pixels
    small = replace(LIMITS, pixels=2_000)

    assert len(plan([a_part(url, number=n) for n in range(4)], SPEC, small)) == 4
    with pytest.raises(RequestError, match="10000 pixels") as refused:
        plan([a_part(url, number=n) for n in range(5)], SPEC, small)
    assert refused.value.code == "image_too_large"
    assert refused.value.param == "messages[0].content[4]"


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original", None])
def test_each_known_detail_is_taken(detail: str | None) -> None:
    """O55, B-043."""
    url = data_url(png(np.zeros((480, 640, 3), np.uint8)))
    (planned,) = plan([a_part(url, detail)], SPEC, LIMITS)

    assert planned.tokens <= (49 if detail == "low" else 81)


def test_another_detail_names_its_place() -> None:
    """O55, O27."""
    with pytest.raises(RequestError) as refused:
        plan([a_part("data:;base64,AAAA", "ultra")], SPEC, LIMITS)
    assert refused.value.param == "messages[0].content[0].image_url.detail"


# -- plan before decode ---------------------------------------------------------------------


async def test_planning_gives_tokens_and_decodes_nothing(pool: DecodePool) -> None:
    """Rule 31, O51: a file whose pixels are cut off is priced, and refused only when decoded."""
    url = data_url((FOLDER / "cut_half.png").read_bytes())

    planned = plan([a_part(url)], SPEC, LIMITS)

    assert 49 <= planned[0].tokens <= 81
    with pytest.raises(RequestError) as refused:
        await decode(planned, pool)
    assert (refused.value.code, refused.value.param) == ("invalid_image", "messages[0].content[0]")


async def test_pictures_come_back_in_their_order(pool: DecodePool) -> None:
    """O48: each stays where it was put, however long the others take."""
    large = data_url(png(np.random.default_rng(1).integers(0, 256, (900, 900, 3), np.uint8)))
    small = data_url((FOLDER / "solid_red.png").read_bytes())
    parts = [a_part(url, number=n) for n, url in enumerate((large, small, large, small))]

    cut = await load(parts, pool)

    assert [picture.digest for picture in cut[:2]] == [picture.digest for picture in cut[2:]]
    assert cut[1].patches[:3] == b"\xff\xff\xff"  # the red channel of the first patch
    picture = cut[1].at(7)
    assert (picture.position, picture.tokens, picture.grid) == (7, cut[1].tokens, cut[1].grid)


async def test_a_picture_that_takes_too_long_is_refused() -> None:
    """O54: the limit starts with the decoding; waiting for a place does not count."""
    pool = DecodePool(1, limit_s=0.2)
    release = threading.Event()
    began = perf_counter()
    with pytest.raises(TimeoutError):
        await pool.run(release.wait)
    assert perf_counter() - began < 5.0

    waiting = asyncio.ensure_future(pool.run(lambda: "done"))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done  # the place is taken until its thread comes back
    release.set()
    assert await waiting == "done"
    pool.close()


async def test_the_loop_stays_free_while_large_pictures_are_decoded(pool: DecodePool) -> None:
    """O54: twenty pictures of 4 megapixels in a bounded pool."""
    noise = np.random.default_rng(2).integers(0, 256, (250, 250, 3), np.uint8)
    large = saved(Image.fromarray(noise).resize((2000, 2000)), "JPEG")
    parts = [a_part(data_url(large), number=n) for n in range(16)]
    longest, before = 0.0, threading.active_count()  # pools of earlier tests may still be there
    done = asyncio.ensure_future(load(parts, pool))
    while not done.done():
        began = perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, perf_counter() - began)

    assert len(done.result()) == 16
    assert threading.active_count() - before < 8
    assert longest < 0.5


# -- identity -------------------------------------------------------------------------------


def digest_of(data: bytes, detail: str | None = None, spec: PatchSpec = SPEC) -> str:
    (planned,) = plan([a_part(data_url(data), detail)], spec, LIMITS)
    return cut_picture(planned).digest


def test_a_digest_covers_the_pixels_and_all_that_shapes_them() -> None:
    """O59, O60, B-046, B-047."""
    one, other = ((FOLDER / f"pixel_{name}.png").read_bytes() for name in "ab")
    narrow = PatchSpec(*(*(getattr(SPEC, f) for f in SPEC.__struct_fields__[:5]), 80, *SPEC_TAIL))

    assert digest_of(one) == digest_of(one)
    assert digest_of(one) == digest_of(one, "auto")
    assert (
        len({digest_of(one), digest_of(other), digest_of(one, "low"), digest_of(one, spec=narrow)})
        == 4
    )


SPEC_TAIL = (SPEC.mean, SPEC.std)


def test_two_thousand_noise_pictures_have_two_thousand_digests() -> None:
    """B-047."""
    random = np.random.default_rng(7)
    seen = {digest_of(png(random.integers(0, 256, (28, 28, 3), np.uint8))) for _ in range(2000)}

    assert len(seen) == 2000


def test_the_same_pixels_in_another_container_are_the_same_picture() -> None:
    """O59: the key is over processed pixels, not over the file."""
    noise = np.random.default_rng(3).integers(0, 256, (56, 56, 3), np.uint8)
    webp = saved(Image.fromarray(noise), "WEBP", lossless=True)

    assert digest_of(png(noise)) == digest_of(webp)


def test_records_of_a_picture_never_show_its_data() -> None:
    """O61: what is logged or raised by accident holds no picture."""
    part = a_part(data_url((FOLDER / "control.png").read_bytes()))
    (planned,) = plan([part], SPEC, LIMITS)
    shown = f"{part} {planned} {cut_picture(planned)}"

    assert "iVBOR" not in shown
    assert "PNG\\r" not in shown
    assert len(shown) < 1_500

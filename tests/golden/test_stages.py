"""Split over stages, a model answers as it does in one: text, one picture, three pictures."""

from __future__ import annotations

import json
from itertools import combinations, product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.config import PublishMode
from engine.config import Transport as Wanted
from engine.device.device import Array
from engine.messages import Picture
from engine.models.overlay import Overlay
from tests.fakes.decoder import Decoder
from tests.fakes.split import SplitDecoder
from tests.golden.pictures import an_encoder, overlay_of, read
from vision.encoder import Encoder

GLIMMER = Path(__file__).parents[2] / "app" / "models" / "glimmer"
TINY = Path(__file__).parents[1] / "fixtures" / "glm5_next_tiny"
IMAGE = 998
REFERENCE: list[dict[str, Any]] = json.loads((GLIMMER / "reference.json").read_text())["prompts"]
BY_NAME = {entry["name"]: entry for entry in REFERENCE}
PROMPTS = {
    "text": "other_with_system",
    "one picture": "one_picture_code",
    "three pictures": "three_pictures_pruned_read_first",
}
FENCES = {  # by name: (of glimmer's 8 layers, of the tiny checkpoint's 6)
    "1": ((0, 8), (0, 6)),
    "2 even": ((0, 4, 8), (0, 3, 6)),
    "2 uneven": ((0, 1, 8), (0, 5, 6)),
    "3 uneven": ((0, 1, 7, 8), (0, 1, 2, 6)),
    "4 uneven": ((0, 2, 3, 7, 8), (0, 1, 3, 4, 6)),
}


class Way(NamedTuple):
    """One way to cut the work."""

    fence: str
    chunk: int
    prompt: str
    publish: PublishMode
    transport: Wanted


def every_pair() -> list[Way]:
    """Few ways that hold every pair of values: always the one with most pairs not yet seen."""
    publish: tuple[PublishMode, ...] = ("auto", "force")
    transport: tuple[Wanted, ...] = ("peer", "host")
    whole = list(starmap(Way, product(FENCES, (64, 7, 1), PROMPTS, publish, transport)))
    left = {pair for way in whole for pair in combinations(enumerate(way), 2)}
    chosen = []
    while left:
        best = max(whole, key=lambda way: len(left & set(combinations(enumerate(way), 2))))
        left -= set(combinations(enumerate(best), 2))
        chosen.append(best)
    return chosen


WAYS = every_pair()


def named(way: Way) -> str:
    return "-".join(str(value) for value in way)


def assert_went_that_way(decoder: SplitDecoder, way: Way, steps: int) -> None:
    """Rules 78 and 116: the counters of the path moved, or the comparison was void."""
    stages = len(decoder.stages)
    split = stages > 1
    counters = decoder.counters
    assert counters["split_steps_total"] == (steps if split else 0)
    assert counters[f"boundary_copies_{way.transport}_total"] == steps * (stages - 1)
    published = way.prompt != "text" and (split or way.publish == "force")
    assert decoder.publications == (1 if published else 0)
    if published:
        route = way.transport if split else "local"
        assert counters[f"overlay_publications_{route}_total"] == 1


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_glimmer_answers_as_the_reference_however_the_work_is_cut(way: Way) -> None:
    """Rules 29, 67, 68, 83: the ids of the reference library, whose margins are wide."""
    decoder = SplitDecoder(
        GLIMMER, FENCES[way.fence][0], transport=way.transport, publish=way.publish
    )
    entry = BY_NAME[PROMPTS[way.prompt]]
    files = [
        GLIMMER / part["file"]
        for message in entry["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    prompt, wanted = entry["prompt_ids"], entry["output_ids"]
    overlay = None
    if files:
        assert decoder.encoder is not None
        overlay = overlay_of(prompt, [read(file) for file in files], IMAGE, decoder.encoder)
        assert overlay.residency == decoder.devices[0].residency

    ids, _ = decoder.greedy(0, prompt, len(wanted), chunks=way.chunk, overlay=overlay)

    assert ids == wanted
    assert_went_that_way(decoder, way, -(-len(prompt) // way.chunk) + len(ids) - 1)


@pytest.fixture(scope="module")
def whole() -> Decoder:
    return Decoder(TINY, context=512)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_the_tiny_checkpoint_gives_every_logit_as_in_one_stage(whole: Decoder, way: Way) -> None:
    """Rules 26, 67, 68, 83: bit for bit, at the same chunks."""
    decoder = SplitDecoder(TINY, FENCES[way.fence][1], transport=way.transport, publish=way.publish)
    count = {"text": 0, "one picture": 1, "three pictures": 3}[way.prompt]
    prompt, pictures = a_tiny_prompt(whole, count)

    want_ids, want = bits(whole, prompt, way.chunk, laid(an_encoder(TINY, whole), pictures))
    got_ids, got = bits(decoder, prompt, way.chunk, laid(decoder.encoder, pictures))

    assert got_ids == want_ids
    assert np.array_equal(got, want)
    assert_went_that_way(decoder, way, -(-len(prompt) // way.chunk) + len(got_ids) - 1)


def a_tiny_prompt(decoder: Decoder, count: int) -> tuple[list[int], list[Picture]]:
    """Plain ids with pictures of noise among them."""
    draw = np.random.default_rng(7)
    prompt = draw.integers(0, 220, 12).tolist()
    pictures = []
    encoder = an_encoder(TINY, decoder)
    spec = encoder.patches
    for number in range(count):
        wide = spec.min_tokens + number
        grid = (1, spec.merge, spec.merge * wide)
        pixels = draw.integers(0, 256, (spec.merge**2 * wide, 3 * spec.patch**2), np.uint8)
        pictures.append(Picture(pixels.tobytes(), grid, len(prompt), wide, str(number)))
        prompt += [decoder.spec.image_token or 0] * wide
        prompt += draw.integers(0, 220, 9).tolist()
    return prompt, pictures


def laid(encoder: Encoder | None, pictures: list[Picture]) -> Overlay | None:
    assert encoder is not None
    return encoder.build(pictures) if pictures else None


def bits(
    decoder: Decoder, prompt: list[int], chunk: int, overlay: Overlay | None
) -> tuple[list[int], Array]:
    ids, rows = decoder.greedy(0, prompt, 10, chunks=chunk, overlay=overlay)
    return ids, np.stack(rows).view(np.uint32)

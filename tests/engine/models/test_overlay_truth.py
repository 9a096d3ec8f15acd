"""Rule 29 with one stage: laying the embeddings of tokens is the same as sending the tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.device.device import Array
from engine.models.overlay import Overlay
from tests.fakes.decoder import Decoder

TINY = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny"
SPANS = [(5, 0, 12), (23, 12, 20)]
LENGTH, ANSWER = 61, 10
CHUNKS: dict[str, list[int]] = {
    "one call": [LENGTH],
    "two calls": [11, LENGTH],
    "token by token": [1],
    "sevens": [7],
    "uneven": [3, 13, 1, 30, 2],
    "cut at the edges": [5, 12, 6, 20, 18],
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(TINY, context=256)


@pytest.fixture(scope="module")
def substitutes() -> list[int]:
    """A prompt of plain ids; those inside the spans stand for pictures."""
    return np.random.default_rng(29).integers(0, 220, LENGTH).tolist()  # type: ignore[no-any-return]


def laid(decoder: Decoder, tokens: list[int], shift: int = 0) -> tuple[list[int], Overlay]:
    """The prompt with placeholders, and the overlay that holds the substitutes' embeddings."""
    prompt = list(tokens)
    inside: list[int] = []
    for position, _, count in SPANS:
        inside += tokens[position : position + count]
        prompt[position : position + count] = [decoder.spec.image_token or 0] * count
    assert decoder.model.weights.embed is not None
    table = decoder.device.download(decoder.model.weights.embed)
    rows = decoder.device.upload(table[inside])
    spans = [(position + shift, row, count) for position, row, count in SPANS]
    return prompt, Overlay.of(rows, spans, decoder.device, decoder.spec.hidden)


def answers(
    decoder: Decoder, prompt: list[int], chunks: list[int], overlay: Overlay | None
) -> tuple[list[int], Array]:
    ids, rows = decoder.greedy(0, prompt, ANSWER, chunks=chunks, overlay=overlay)
    return ids, np.stack(rows)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_laid_rows_are_bit_identical_to_the_tokens_they_stand_for(
    decoder: Decoder, substitutes: list[int], chunks: list[int]
) -> None:
    """Rules 29 and 39: the prompt and ten tokens behind it, wherever the prompt is cut.

    Rule 43 too: this model has residual streams, and rows that were laid behind their expansion
    would not be those of a token.
    """
    assert decoder.spec.residual is not None
    prompt, overlay = laid(decoder, substitutes)

    want_ids, want = answers(decoder, substitutes, chunks, None)
    got_ids, got = answers(decoder, prompt, chunks, overlay)

    assert got_ids == want_ids
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_spans_one_position_to_the_right_are_seen(
    decoder: Decoder, substitutes: list[int], chunks: list[int]
) -> None:
    """Rule 29, its red arm: each comparison above must fail."""
    prompt, overlay = laid(decoder, substitutes, shift=1)

    want_ids, want = answers(decoder, substitutes, chunks, None)
    got_ids, got = answers(decoder, prompt, chunks, overlay)

    assert not np.array_equal(got[0], want[0])
    assert got_ids != want_ids

"""With the exact ops logits are the same bits in any company, for any cut, and recomputed (D9).

The reference fails each of these questions; that its ids are the same is the golden tests' matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.device.device import Array
from engine.models.overlay import Overlay
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from tests.fakes.decoder import Decoder
from tests.golden.pictures import an_encoder, overlay_of, read

ROOT = Path(__file__).parents[2]
GLIMMER = ROOT / "app" / "models" / "glimmer"
TINY = ROOT / "tests" / "fixtures" / "glm5_next_tiny"
SLOTS, ANSWER = 16, 10
IMAGE = 998


class Text(NamedTuple):
    """A prompt, the pictures over it, and what is fed behind it as if it had been drawn."""

    prompt: list[int]
    overlay: Overlay | None
    answer: list[int]


class Subject(NamedTuple):
    """A model under question."""

    decoder: Decoder
    text: Text
    others: list[list[int]]  # prompts of other sequences, shorter and longer ones


def glimmer(backend: type[ReferenceOps]) -> Subject:
    """Four pictures, more than 300 tokens, of which the indexer leaves some out."""
    decoder = Decoder(GLIMMER, slots=SLOTS, context=640, backend=backend)
    prompts: list[dict[str, Any]] = json.loads((GLIMMER / "reference.json").read_text())["prompts"]
    (entry,) = (p for p in prompts if p["name"] == "four_pictures_pruned_long")
    files = [
        GLIMMER / part["file"]
        for message in entry["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    prompt = entry["prompt_ids"]
    encoder = an_encoder(GLIMMER, decoder)
    overlay = overlay_of(prompt, [read(file) for file in files], IMAGE, encoder)
    return Subject(
        decoder,
        Text(prompt, overlay, drawn(ANSWER, 900)),
        [drawn(9 + 24 * i, 900) for i in range(15)],
    )


def tiny(backend: type[ReferenceOps]) -> Subject:
    decoder = Decoder(TINY, slots=SLOTS, context=256, page_tokens=16, backend=backend)
    text = Text(drawn(150, 90), None, drawn(ANSWER, 90))
    return Subject(decoder, text, [drawn(5 + 11 * i, 90) for i in range(15)])


def drawn(count: int, below: int) -> list[int]:
    ids: list[int] = np.random.default_rng([count, below]).integers(0, below, count).tolist()
    return ids


MODELS = {"glimmer": glimmer, "tiny": tiny}


@pytest.fixture(scope="module", params=MODELS)
def exact(request: pytest.FixtureRequest) -> Subject:
    return MODELS[request.param](ExactOps)


@pytest.fixture(scope="module", params=MODELS)
def plain(request: pytest.FixtureRequest) -> Subject:
    return MODELS[request.param](ReferenceOps)


def alone(subject: Subject, chunks: Sequence[int] | int, slot: int = 0) -> Array:
    """Logits behind the prompt and behind each token of the answer. (ANSWER + 1, vocab)"""
    decoder, text = subject.decoder, subject.text
    decoder.begin(slot)
    logits = [decoder.prefill(slot, text.prompt, chunks, text.overlay)[0]]
    logits += [decoder.step([(slot, [token])])[0] for token in text.answer]
    return np.array(logits)


def gather(subject: Subject, size: int) -> None:
    """Company for slot 0: the first of the others, each in its own slot, behind its prompt."""
    for slot, prompt in enumerate(subject.others[: size - 1], 1):
        subject.decoder.begin(slot)
        subject.decoder.prefill(slot, prompt, 256)


def beside(subject: Subject, size: int, place: int) -> Array:
    """As `alone`, one of so many sequences, in that place of each step."""
    decoder, text = subject.decoder, subject.text
    decoder.begin(0)
    logits = [decoder.prefill(0, text.prompt, 256, text.overlay)[0]]
    for at, token in enumerate(text.answer):
        work = [(slot, [subject.others[slot - 1][at % 5]]) for slot in range(1, size)]
        work.insert(place, (0, [token]))
        logits.append(decoder.step(work)[place])
    return np.array(logits)


def differ(got: Array, want: Array) -> int:
    return int(np.count_nonzero(got.view(np.int32) != want.view(np.int32)))


CUTS = [1, 7, 64, 256, [1, 62, 100, 3, 90]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_where_a_prompt_was_cut_cannot_be_seen(exact: Subject, cuts: list[int] | int) -> None:
    """R30: chunks of 1, 7, 64, 256 and any others, pictures cut apart, against the whole."""
    assert differ(alone(exact, cuts, slot=3), alone(exact, 1000)) == 0


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_company_cannot_be_seen(exact: Subject, size: int) -> None:
    """D9, O30: first, in the middle and last, beside shorter and longer texts."""
    want = alone(exact, 256)
    gather(exact, size)
    for place in {0, size // 2, size - 1}:
        assert differ(beside(exact, size, place), want) == 0


def test_a_prompt_beside_answers_cannot_see_them(exact: Subject) -> None:
    """Chunks of the prompt in steps that hold others' decode rows; and those rows the same."""
    decoder, text, other = exact.decoder, exact.text, exact.others[4]
    decoder.begin(1)
    quiet = [decoder.prefill(1, other, 256)[0]]
    quiet += [decoder.step([(1, [token])])[0] for token in other[:8]]

    decoder.begin(1)
    busy = [decoder.prefill(1, other, 256)[0]]
    decoder.begin(2)
    tokens, size = text.prompt[:120], 15
    last = None
    for turn, token in enumerate(other[:8]):
        busy_row, last = decoder.step([(1, [token]), (2, tokens[turn * size : (turn + 1) * size])])
        busy.append(busy_row)

    decoder.begin(3)
    assert differ(np.array(busy), np.array(quiet)) == 0
    assert last is not None
    assert differ(last, decoder.prefill(3, tokens, 1000)[0]) == 0


@pytest.mark.parametrize("emitted", [1, 4, ANSWER])
def test_a_resumed_answer_has_the_bits_of_an_undisturbed_one(exact: Subject, emitted: int) -> None:
    """Rules 62, 75, 83: prompt + emitted recomputed as a prompt, then decoded on."""
    decoder, text = exact.decoder, exact.text
    want = alone(exact, 256)[emitted:]

    decoder.begin(5)
    again = [decoder.prefill(5, text.prompt + text.answer[:emitted], 100, text.overlay)[0]]
    again += [decoder.step([(5, [token])])[0] for token in text.answer[emitted:]]

    assert differ(np.array(again), want) == 0


def test_the_default_ops_fail_these_questions(plain: Subject) -> None:
    """The red arm: cuts, company and recomputing each change bits there, within the tolerance."""
    want = alone(plain, 256)
    gather(plain, 5)
    decoder, text = plain.decoder, plain.text
    decoder.begin(5)
    again = decoder.prefill(5, text.prompt + text.answer, 256, text.overlay)[0]
    for got, wanted in ((alone(plain, 7), want), (beside(plain, 5, 4), want), (again, want[-1])):
        assert differ(got, wanted) > 0
        np.testing.assert_allclose(got, wanted, atol=1e-3, rtol=0)

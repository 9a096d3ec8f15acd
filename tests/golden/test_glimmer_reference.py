"""Glimmer answers as the reference library does: ids, margins and logits of reference.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from tests.fakes.decoder import Decoder
from tests.golden.pictures import an_encoder, overlay_of, read
from vision.encoder import Encoder

FOLDER = Path(__file__).parents[2] / "app" / "models" / "glimmer"
REFERENCE: list[dict[str, Any]] = json.loads((FOLDER / "reference.json").read_text())["prompts"]
IMAGE = 998
TEXT = [entry for entry in REFERENCE if IMAGE not in entry["prompt_ids"]]
PICTURES = [entry for entry in REFERENCE if IMAGE in entry["prompt_ids"]]
TOLERANCE = 1e-3  # of margins and of the top logits


@pytest.fixture(scope="module", params=[ReferenceOps, ExactOps])
def glimmer(request: pytest.FixtureRequest) -> Decoder:
    return Decoder(FOLDER, slots=3, context=512, backend=request.param)


@pytest.fixture(scope="module")
def encoder(glimmer: Decoder) -> Encoder:
    return an_encoder(FOLDER, glimmer)


def names(entry: dict[str, Any]) -> str:
    return str(entry["name"])


def assert_answers(entry: dict[str, Any], ids: list[int], rows: list[Any]) -> None:
    assert ids == entry["output_ids"]
    top = np.sort(np.array(rows), axis=1)[:, -2:]
    np.testing.assert_allclose(top[:, 1] - top[:, 0], entry["top1_margins"], atol=TOLERANCE, rtol=0)
    first = entry["first_step_top5"]
    np.testing.assert_allclose(rows[0][first["ids"]], first["logits"], atol=TOLERANCE, rtol=0)
    assert set(np.argsort(rows[0])[-5:].tolist()) == set(first["ids"])


@pytest.mark.parametrize("chunks", [256, 7])
@pytest.mark.parametrize("entry", TEXT, ids=names)
def test_text_prompts_answer_as_the_reference(
    glimmer: Decoder, entry: dict[str, Any], chunks: int
) -> None:
    ids, rows = glimmer.greedy(0, entry["prompt_ids"], len(entry["output_ids"]), chunks=chunks)
    assert_answers(entry, ids, rows)


@pytest.mark.parametrize("chunks", [256, 37])
@pytest.mark.parametrize("entry", PICTURES, ids=names)
def test_prompts_with_pictures_answer_as_the_reference(
    glimmer: Decoder, encoder: Encoder, entry: dict[str, Any], chunks: int
) -> None:
    """Up to four pictures, cut by chunks anywhere; three of the prompts prune."""
    files = [
        FOLDER / part["file"]
        for message in entry["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    prompt = entry["prompt_ids"]
    overlay = overlay_of(prompt, [read(file) for file in files], IMAGE, encoder)
    ids, rows = glimmer.greedy(0, prompt, len(entry["output_ids"]), chunks=chunks, overlay=overlay)
    assert_answers(entry, ids, rows)


def test_the_checkpoint_is_described(glimmer: Decoder) -> None:
    """End ids of generation_config.json; 24 spare vocabulary rows are never drawn."""
    spec = glimmer.spec
    assert spec.end_ids == (964, 971, 973)
    assert (spec.vocab, spec.usable_vocab) == (1024, 1000)
    assert spec.image_token == IMAGE
    assert set(spec.vision_ids) == {998, 999, 974, 975, 976, 977}

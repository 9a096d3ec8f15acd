"""A model over several stages: every stage its own context, every hand-over checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from engine.device.device import Array
from engine.device.host import HostDevice
from engine.errors import NotResident, RequestFault, RowsMissing, StateReleased
from engine.models.overlay import Overlay
from engine.models.state import KdaState, LatentState
from engine.pipeline.pipeline import Pipeline
from tests.fakes.decoder import Decoder
from tests.fakes.split import SplitDecoder

TINY = Path(__file__).parents[2] / "fixtures" / "glm5_next_tiny"
FENCES = [(0, 6), (0, 3, 6), (0, 5, 6), (0, 1, 2, 6), (0, 1, 3, 4, 6)]
SPANS = [(5, 0, 12), (23, 12, 20)]
LENGTH, ANSWER = 61, 8
CHUNKS = {"one call": [LENGTH], "two calls": [11, LENGTH], "uneven": [3, 13, 1, 30, 2]}


@pytest.fixture(scope="module")
def substitutes() -> list[int]:
    """A prompt of plain ids; those inside the spans stand for pictures."""
    return np.random.default_rng(29).integers(0, 220, LENGTH).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=FENCES, ids=str)
def split(request: pytest.FixtureRequest) -> SplitDecoder:
    return SplitDecoder(TINY, request.param)


# -- rule 29 ---------------------------------------------------------------------------------------


def laid(decoder: SplitDecoder, tokens: list[int], shift: int = 0) -> tuple[list[int], Overlay]:
    """The prompt with placeholders, and the embeddings of the substitutes where intake is."""
    prompt = list(tokens)
    inside: list[int] = []
    for position, _, count in SPANS:
        inside += tokens[position : position + count]
        prompt[position : position + count] = [decoder.spec.image_token or 0] * count
    intake = decoder.devices[0]
    assert decoder.model.weights.embed is not None
    rows = intake.upload(intake.download(decoder.model.weights.embed)[inside])
    spans = [(position + shift, row, count) for position, row, count in SPANS]
    return prompt, Overlay.of(rows, spans, intake, decoder.spec.hidden)


def bits(
    decoder: SplitDecoder, prompt: list[int], chunks: list[int], overlay: Overlay | None
) -> tuple[list[int], Array]:
    ids, rows = decoder.greedy(0, prompt, ANSWER, chunks=chunks, overlay=overlay)
    return ids, np.stack(rows).view(np.uint32)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_laid_rows_are_bit_identical_to_the_tokens_they_stand_for(
    split: SplitDecoder, substitutes: list[int], chunks: list[int]
) -> None:
    """Rule 29 on 1 to 4 stages, and rule 62: the same again after another sequence."""
    prompt, overlay = laid(split, substitutes)

    want_ids, want = bits(split, substitutes, chunks, None)
    got_ids, got = bits(split, prompt, chunks, overlay)

    assert got_ids == want_ids
    assert np.array_equal(got, want)
    assert np.array_equal(bits(split, substitutes, chunks, None)[1], want)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_spans_one_position_to_the_right_are_seen(
    split: SplitDecoder, substitutes: list[int], chunks: list[int]
) -> None:
    """Rule 29, its red arm: each comparison above must fail."""
    prompt, overlay = laid(split, substitutes, shift=1)

    assert not np.array_equal(
        bits(split, prompt, chunks, overlay)[1], bits(split, substitutes, chunks, None)[1]
    )


# -- rule 83 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize(
    ("fence", "order"),
    [((0, 3, 6), "rising"), ((0, 5, 6), "falling"), ((0, 1, 3, 4, 6), "falling")],
    ids=str,
)
def test_a_split_batch_decodes_as_the_whole_one(
    fence: tuple[int, ...], width: int, order: str
) -> None:
    """Rule 83: every logit of every row of every step, in both orders of devices."""
    count = len(fence) - 1
    devices = [HostDevice(f"cpu:{n}", n, 0) for n in range(count)]
    if order == "falling":
        devices.reverse()
    split = SplitDecoder(TINY, fence, slots=width, context=128, page_tokens=16, devices=devices)
    whole = Decoder(TINY, slots=width, context=128, page_tokens=16)
    draw = np.random.default_rng(width)
    last = {slot: draw.integers(0, 220, 3 + slot).tolist() for slot in range(width)}
    for decoder in (whole, split):
        for slot in range(width):
            decoder.begin(slot)
            decoder.step([(slot, last[slot])])

    tokens = dict.fromkeys(range(width), 7)
    for _ in range(6):
        work = [(slot, [token]) for slot, token in tokens.items()]
        want, got = whole.step(work), split.step(work)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
        tokens = {slot: int(row.argmax()) for slot, row in enumerate(want)}

    assert split.counters["split_steps_total"] == width + 6


# -- what a stage owns, and what it takes ----------------------------------------------------------


def test_each_stage_has_its_weights_and_states_on_its_own_device() -> None:
    """Rules 50, 51: nothing of a stage lives elsewhere; the ends have what is theirs."""
    decoder = SplitDecoder(TINY, (0, 2, 4, 6))

    for stage, device in zip(decoder.stages, decoder.devices, strict=True):
        weights = stage._weights
        assert sorted(weights.layers) == list(stage.layers)
        assert (weights.embed is not None) is (stage is decoder.stages[0])
        assert (weights.norm is not None) is (stage is decoder.stages[-1])
        assert (weights.head is not None) is (stage is decoder.stages[-1])
        owned = [layer.mixer_site.norm for layer in weights.layers.values()]
        for state in stage._states:
            match state:
                case LatentState():
                    owned.append(state.latents.pages)
                case KdaState():
                    owned.append(state.memory)
        assert {device.locate(array) for array in owned} == {device.residency}
    assert len({stage.ops for stage in decoder.stages}) == 3


def test_rows_of_another_context_are_refused() -> None:
    """R105: never relabelled, and nothing ran."""
    split = SplitDecoder(TINY, (0, 3, 6))
    split.begin(0)
    batch = split.batch([(0, [1, 2, 3])])
    rows = split.stages[0].run(None, batch, [0])

    with pytest.raises(NotResident, match="send them through the boundary"):
        split.stages[1].run(rows, batch, [0])

    assert not split.stages[1].wrote


def test_image_rows_are_for_the_first_stage_only(substitutes: list[int]) -> None:
    """Rule 25."""
    decoder = SplitDecoder(TINY, (0, 3, 6))
    prompt, overlay = laid(decoder, substitutes)
    decoder.begin(0)
    batch = decoder.batch([(0, prompt)], overlay)
    rows = decoder.pipeline.boundaries[0].send(decoder.stages[0].run(None, batch, [0]))

    with pytest.raises(RequestFault, match="no image rows"):
        decoder.stages[1].run(rows, batch, [0])


def test_image_rows_of_another_context_change_nothing(substitutes: list[int]) -> None:
    """Rules 5, 11: rows on the tower's device are refused until they are published."""
    decoder = SplitDecoder(TINY, (0, 3, 6))
    prompt, overlay = laid(decoder, substitutes)
    tower = decoder.devices[1]
    foreign = Overlay.of(
        tower.upload(overlay.rows), overlay.spans, tower, decoder.spec.hidden
    ).window(0, LENGTH)
    assert foreign is not None
    decoder.begin(0)
    batch = replace(decoder.batch([(0, prompt)]), overlays=((0, foreign),))

    with pytest.raises(NotResident, match="publish them"):
        decoder.pipeline.walk(batch, [0])

    assert not decoder.stages[0].wrote
    assert decoder.counters["split_steps_total"] == 0


def test_a_stage_whose_cursor_stands_behind_fails_the_step() -> None:
    """R103: every stage compares; what one refuses is refused for all, and stage 2 never ran."""
    decoder = SplitDecoder(TINY, (0, 1, 4, 6))
    decoder.begin(0)
    decoder.step([(0, [1, 2, 3])])
    decoder.stages[1].release(0)

    with pytest.raises((RowsMissing, StateReleased)):
        decoder.step([(0, [4])])

    assert decoder.counters["split_steps_total"] == 1
    assert decoder.pipeline.boundaries[0].copies == 2
    assert decoder.pipeline.boundaries[1].copies == 1


def test_a_walk_that_failed_gives_the_boundaries_back() -> None:
    """Rule 63: the next one finds them free, and its answer is right."""
    decoder = SplitDecoder(TINY, (0, 3, 6))
    wanted = decoder.greedy(0, [5, 6, 7], 4)[0]
    for _ in range(5):
        decoder.begin(0)
        decoder.step([(0, [1, 2, 3])])
        decoder.stages[1].release(0)
        with pytest.raises((RowsMissing, StateReleased)):
            decoder.step([(0, [4])])

    assert decoder.greedy(0, [5, 6, 7], 4)[0] == wanted
    assert decoder.pipeline.boundaries[0].collisions == 0


def test_a_second_walk_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 63: on another thread, while the first is inside a stage."""
    decoder = SplitDecoder(TINY, (0, 3, 6))
    decoder.begin(0)
    batch = decoder.batch([(0, [1, 2, 3])])
    refused: list[RequestFault] = []
    inner = decoder.stages[1].run

    def second() -> None:
        try:
            decoder.pipeline.walk(batch, [0])
        except RequestFault as error:
            refused.append(error)

    def run(x: Array | None, batch: object, fresh: list[int]) -> Array:
        other = Thread(target=second)
        other.start()
        other.join(10)
        return inner(x, batch, fresh)  # type: ignore[arg-type]

    monkeypatch.setattr(decoder.stages[1], "run", run)
    decoder.pipeline.walk(batch, [0])

    assert "another step" in str(refused[0])
    assert decoder.counters["split_steps_total"] == 1


def test_stages_need_the_boundary_between_them() -> None:
    decoder = SplitDecoder(TINY, (0, 3, 6))

    with pytest.raises(AssertionError, match="no boundary from stage 0"):
        Pipeline(decoder.stages)

"""Reuse on a real model: the same tokens, the same bytes, the right picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.cache.budget import CachePlan, plan_caches
from engine.config import EngineConfig
from engine.device.faults import Judge, Latch
from engine.device.host import HostDevice
from engine.engine import Engine
from engine.messages import Finished, Generate, Picture, RequestId, Token
from engine.models.registry import load_model
from engine.models.state import KdaState, LatentState
from engine.ops.reference.ops import ReferenceOps
from engine.pipeline.pipeline import Pipeline
from engine.pipeline.stage import Stage
from tests.golden.pictures import read
from vision.encoder import Encoder, load_encoder
from vision.preprocess import cut, plan_grid

GLIMMER = Path(__file__).parents[3] / "app" / "models" / "glimmer"
IMAGE = 998


class Glimmer:
    """The default model with its tower; engines over it, each with caches of its own."""

    def __init__(self) -> None:
        self.device = HostDevice("cpu:0", 0, 0)
        self.ops = ReferenceOps(self.device)
        self.model = load_model(GLIMMER, self.ops, self.device, lambda *_: None)
        encoder = load_encoder(
            GLIMMER, self.model.config, self.model.source, self.model.spec, self.ops, self.device
        )
        assert encoder is not None
        self.encoder: Encoder = encoder

    def engine(self, *, prefix_cache: bool = True) -> tuple[Engine, Stage]:
        config = EngineConfig(
            model="glimmer", max_sequences=4, max_context=1_024, prefix_cache=prefix_cache
        )
        caches = plan_caches(self.model.spec, config, free_bytes=1 << 28)
        stage = self.stage(dataclasses.replace(caches, snapshot_tokens=128))
        judge = Judge([self.device], Latch())
        return Engine(config, self.model.spec, Pipeline([stage]), self.encoder, judge), stage

    def stage(self, caches: CachePlan) -> Stage:
        spec = self.model.spec
        return Stage(
            range(len(spec.layers)),
            device=self.device,
            ops=self.ops,
            spec=spec,
            weights=self.model.weights,
            caches=caches,
        )

    def text(self, count: int, seed: int) -> tuple[int, ...]:
        draw = np.random.default_rng(seed)
        return tuple(int(i) for i in draw.integers(0, 900, count))

    def picture(self, file: str, position: int) -> Picture:
        image = read(GLIMMER / "samples" / file).resize((224, 224))
        grid = plan_grid(image.height, image.width, self.encoder.patches)
        data = cut(image, self.encoder.patches, grid).tobytes()
        return Picture(data, grid.thw, position, grid.tokens, file)


@pytest.fixture(scope="module")
def glimmer() -> Glimmer:
    return Glimmer()


def answer(engine: Engine, ask: Generate) -> tuple[list[int], int]:
    """Tokens of one request, and how much of its prompt was there already."""
    engine.add(ask)
    events = []
    while engine.busy:
        events += engine.step()
    *tokens, end = events
    assert isinstance(end, Finished), events
    return [event.id for event in tokens if isinstance(event, Token)], end.cached_tokens


def an_ask(name: str, prompt: tuple[int, ...], *pictures: Picture) -> Generate:
    return Generate(request=RequestId(name), prompt=prompt, pictures=pictures, max_tokens=16)


def test_a_known_beginning_changes_no_token(glimmer: Glimmer) -> None:
    """R16, R25, R64: latents, index rows, pool keys and recurrent state are all where they were."""
    on, _ = glimmer.engine()
    off, _ = glimmer.engine(prefix_cache=False)
    beginning = glimmer.text(300, 1)
    asks = [an_ask(f"r{n}", beginning + glimmer.text(40, n)) for n in (2, 3, 2, 4)]
    asks.append(an_ask("short", beginning[:200]))

    seen = [(answer(on, ask), answer(off, ask)) for ask in asks]

    assert [with_it[0] for with_it, _ in seen] == [without[0] for _, without in seen]
    assert [without[1] for _, without in seen] == [0] * 5
    assert [with_it[1] for with_it, _ in seen] == [0, 256, 320, 256, 128]


def test_what_is_loaded_is_what_was_saved_and_cursors_stand_behind_it(glimmer: Glimmer) -> None:
    """R25, R27: to the byte, with the watermark of pool keys."""
    engine, stage = glimmer.engine()
    answer(engine, an_ask("a", glimmer.text(300, 1)))
    engine.add(an_ask("b", glimmer.text(300, 1)))

    engine.step()

    for state in stage._states:
        if isinstance(state, LatentState):
            (cursor,) = [c for c in state._cursors if c is not None and not c._released]
            assert (len(cursor), cursor.pooled) == (300, 75)
    recurrent = next(state for state in stage._states if isinstance(state, KdaState))
    draw = np.random.default_rng(0)
    arrays = recurrent.memory, recurrent.window
    for array in arrays:
        array[2] = draw.random(array[2].shape)
    want = [array[2].copy() for array in arrays]
    last = stage.caches.snapshots - 1
    stage.keep(2, last)
    for array in arrays:
        array[:3] = 0.0
    stage.resume(1, 64, last)
    assert all((array[1] == saved).all() for array, saved in zip(arrays, want, strict=True))
    assert all((array[2] == 0.0).all() for array in arrays)
    for state in stage._states:
        if isinstance(state, LatentState):
            assert (len(state.cursor(1)), state.cursor(1).pooled) == (64, 16)


def test_equal_ids_with_another_picture_are_another_prompt(glimmer: Glimmer) -> None:
    """Rule 38, O59: different answers; what is reused ends in front of the picture."""
    engine, _ = glimmer.engine()
    alone, _ = glimmer.engine(prefix_cache=False)
    before = glimmer.text(150, 1)
    pictures = {file: glimmer.picture(file, 150) for file in ("1.png", "2.png")}
    size = pictures["1.png"].tokens
    assert pictures["2.png"].tokens == size
    prompt = before + (IMAGE,) * size + glimmer.text(30, 2)

    def both(name: str, file: str) -> tuple[list[int], int]:
        ask = an_ask(name, prompt, pictures[file])
        tokens, cached = answer(engine, ask)
        assert tokens == answer(alone, ask)[0]
        return tokens, cached

    red, other, again = both("a", "1.png"), both("b", "2.png"), both("c", "1.png")

    assert (red[1], other[1]) == (0, 128)
    assert again[1] > 150 + size - 64
    assert red[0] == again[0] != other[0]


def test_after_everything_is_forgotten_all_is_at_the_start_again(glimmer: Glimmer) -> None:
    """R65: pages, kept pages and snapshots add up, and device memory never moved."""
    engine, _ = glimmer.engine()
    before = glimmer.device.allocations
    for n in range(12):
        answer(engine, an_ask(f"r{n}", glimmer.text(200, n % 5) + glimmer.text(30, n)))
    scheduler = engine._scheduler
    assert scheduler.prefixes.blocks + scheduler.pages.free == scheduler.pages.total
    assert scheduler.prefixes.snapshots.out > 0

    scheduler.prefixes.clear()

    assert scheduler.pages.free == scheduler.pages.total
    assert (scheduler.prefixes.size, scheduler.prefixes.snapshots.out) == (0, 0)
    assert glimmer.device.allocations == before


def test_a_repeated_picture_skips_the_tower(glimmer: Glimmer) -> None:
    """Its rows are those that the tower made, and they go when newer ones need the room."""
    picture = glimmer.picture("1.png", 0)
    kept = load_encoder(
        GLIMMER,
        glimmer.model.config,
        glimmer.model.source,
        glimmer.model.spec,
        glimmer.ops,
        glimmer.device,
        kept_bytes=glimmer.encoder.build([picture]).rows.nbytes,
    )
    assert kept is not None
    first = kept.build([picture])

    second = kept.build([msgspec.structs.replace(picture, patches=b"", position=7)])

    assert second.rows is first.rows
    assert (kept.kept.queries, kept.kept.hits) == (2, 1)
    other = kept.build([glimmer.picture("2.png", 0)])
    assert kept.kept.bytes == other.rows.nbytes
    assert kept.build([picture]).rows is not first.rows
    assert kept.kept.hits == 1
    kept.kept.clear()
    assert kept.kept.bytes == 0

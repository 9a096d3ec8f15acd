"""The sampler: each slot by its own settings, whatever slots were before (O30, rule 30)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.device.host import HostDevice
from engine.messages import Sampling
from engine.ops.reference.ops import ReferenceOps
from engine.sampling.sampler import Sampler
from tests.fakes.pipeline import IMAGE, SPEC


def a_sampler(slots: int = 4) -> Sampler:
    return Sampler(SPEC, ReferenceOps(HostDevice("cpu:0", 0, 0)), slots=slots)


def some_logits(rows: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, (rows, SPEC.vocab)).astype(np.float32)


def draw(
    sampler: Sampler,
    logits: npt.NDArray[np.float32],
    slots: list[int],
    banned: list[tuple[int, ...]] | None = None,
) -> list[int]:
    ids, _ = sampler.draw(
        logits.copy(), np.array(slots), [9] * len(slots), banned or [()] * len(slots)
    )
    drawn: list[int] = ids.tolist()
    return drawn


def test_a_slot_draws_by_the_settings_of_its_present_owner() -> None:
    sampler, logits = a_sampler(), some_logits(1)
    warm = Sampling(temperature=2.0, seed=8, top_p=0.9, top_k=40, min_p=0.01)
    fresh = a_sampler()
    fresh.set(2, warm, 1)
    want = draw(fresh, logits, [2])

    assert want != [int(logits[0, :IMAGE].argmax())], "the two settings must differ to tell"
    sampler.set(2, Sampling(temperature=0.0), 0)
    greedy = draw(sampler, logits, [2])
    sampler.set(2, warm, 1)

    assert draw(sampler, logits, [2]) == want
    assert greedy == [int(logits[0, :IMAGE].argmax())]


def test_slots_do_not_mix() -> None:
    sampler, logits = a_sampler(), some_logits(3)
    for slot in range(3):
        sampler.set(slot, Sampling(temperature=1.0, seed=slot), 0)

    together = draw(sampler, logits, [2, 0, 1])

    alone = [draw(sampler, logits[[row]], [slot])[0] for row, slot in enumerate([2, 0, 1])]
    assert together == alone


def test_a_negative_seed_is_a_seed_of_its_own() -> None:
    """O23: signed 64 bit."""
    logits = some_logits(1)
    drawn = []
    for seed in (-1, 1, -(2**63)):
        sampler = a_sampler(1)
        sampler.set(0, Sampling(temperature=2.0, seed=seed), 0)
        ids: list[Any] = [
            sampler.draw(logits.copy(), np.array([0]), [position], [()])[0].tolist()
            for position in range(20)
        ]
        drawn.append(ids)

    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_vision_and_padding_ids_are_never_drawn() -> None:
    """Rule 30: the model cannot write the image token itself."""
    sampler = a_sampler()
    logits = some_logits(2)
    logits[:, SPEC.usable_vocab :] = 60.0
    logits[:, [*SPEC.vision_ids, IMAGE]] = 50.0
    logits[:, 17] = 40.0

    for temperature in (0.0, 1.0):
        sampler.set(0, Sampling(temperature=temperature), 0)
        sampler.set(1, Sampling(temperature=temperature, seed=5), 0)
        assert draw(sampler, logits, [0, 1]) == [17, 17]


def test_the_image_token_is_never_drawn_also_when_the_family_does_not_list_it() -> None:
    spec = dataclasses.replace(SPEC, vision_ids=())
    sampler = Sampler(spec, ReferenceOps(HostDevice("cpu:0", 0, 0)), slots=1)
    logits = some_logits(1)
    logits[0, IMAGE] = 50.0
    sampler.set(0, Sampling(), 0)

    assert draw(sampler, logits, [0]) != [IMAGE]


def test_a_ban_holds_for_its_row_and_its_step() -> None:
    sampler, logits = a_sampler(), some_logits(2)
    logits[:, 17] = 40.0
    logits[:, 18] = 30.0
    for slot in (0, 1):
        sampler.set(slot, Sampling(), 0)

    assert draw(sampler, logits, [0, 1], [(), (17, 4_000)]) == [17, 18]
    assert draw(sampler, logits, [0, 1]) == [17, 17]


def test_positions_move_the_draw() -> None:
    """O30."""
    sampler = a_sampler(1)
    sampler.set(0, Sampling(temperature=2.0, seed=1), 0)
    logits = some_logits(1)

    drawn = set()
    for position in range(40):
        ids: Any = sampler.draw(logits.copy(), np.array([0]), [position], [()])[0]
        drawn.add(int(ids[0]))

    assert len(drawn) > 10

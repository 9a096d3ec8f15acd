"""Drawing tokens, against plain loops and the distribution itself (O23, O25, O30, O86)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.errors import ShapeMismatch
from engine.ops.reference.sampling import _draw, _head, sample, uniforms

Floats = npt.NDArray[Any]


def draw(
    logits: Floats,
    *,
    temperature: float | list[float] = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    choice: int = 0,
    banned: tuple[tuple[int, int], ...] = (),
    usable: int | None = None,
) -> tuple[Floats, Floats]:
    """`sample` with the same settings for all rows."""
    rows, vocab = logits.shape
    counters = np.zeros((rows, 2), np.uint32)
    counters[:, 0] = choice
    counters[:, 1] = range(rows) if positions is None else positions
    return sample(
        logits.astype(np.float32),
        temperature=np.broadcast_to(temperature, (rows,)).astype(np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        min_p=np.full(rows, min_p, np.float32),
        seeds=np.array(seeds or [0] * rows, np.uint64),
        counters=counters,
        banned=banned,
        usable=vocab if usable is None else usable,
    )


def kept_by_hand(
    row: Floats, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """The filters as sentences: ids that may be drawn and their probabilities."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if top_k:
        order = order[:top_k]
    weights = [math.exp((float(row[i]) - float(row[order[0]])) / temperature) for i in order]
    total, run = sum(weights), 0.0
    head: list[tuple[int, float]] = []
    for i, weight in zip(order, weights, strict=True):
        if not head or run < top_p * total or top_p == 1.0:
            head.append((i, weight))
        run += weight
    head = [(i, weight) for i, weight in head if weight >= min_p * head[0][1]]
    mass = sum(weight for _, weight in head)
    return {i: weight / mass for i, weight in head}


def many_draws(row: Floats, count: int = 20_000, **settings: Any) -> dict[int, float]:
    """Shares of the ids over so many positions."""
    ids, _ = draw(np.tile(row, (count, 1)), positions=list(range(count)), **settings)
    found, counts = np.unique(ids, return_counts=True)
    return {int(i): int(c) / count for i, c in zip(found, counts, strict=True)}


def test_greedy_takes_the_likeliest_and_ties_go_to_the_lower_id() -> None:
    logits = np.array([[0, 5, 1, 5], [2, 2, 2, 2], [-9, -8, -7, -7]])

    ids, _ = draw(logits, temperature=0.0)

    assert ids.tolist() == [1, 0, 2]
    assert ids.dtype == np.int32


def test_a_temperature_below_a_thousandth_is_greedy() -> None:
    """O23."""
    logits = np.array([[0.0, 1e-4, 0.0]]).repeat(200, 0)

    assert set(draw(logits, temperature=9.99e-4)[0].tolist()) == {1}
    assert len(set(draw(logits, temperature=1e-2)[0].tolist())) == 3


def test_the_logprob_is_of_the_unmodified_distribution() -> None:
    """Before temperature, filters, bans and padding."""
    logits = np.random.default_rng(1).normal(0, 4, (5, 40))
    banned = tuple((row, int(logits[row].argmax())) for row in range(5))

    for settings in ({"temperature": 0.0}, {"temperature": 0.3, "top_k": 3}):
        ids, logprobs = draw(logits, banned=banned, usable=30, **settings)  # type: ignore[arg-type]
        for row, (i, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            want = logits[row, i] - math.log(sum(math.exp(v) for v in logits[row]))
            assert logprob == pytest.approx(want, abs=1e-5)
            assert logprob <= 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_and_padding_ids_are_never_drawn(temperature: float) -> None:
    logits = np.zeros((300, 6))
    logits[:, 5] = 50.0
    logits[:, 2] = 40.0

    ids, _ = draw(
        logits, temperature=temperature, usable=5, banned=tuple((row, 2) for row in range(300))
    )

    assert set(ids.tolist()) <= {0, 1, 3, 4}


def test_a_ban_holds_for_its_row_only() -> None:
    ids, _ = draw(np.array([[1.0, 9.0], [1.0, 9.0]]), temperature=0.0, banned=((1, 1),))

    assert ids.tolist() == [1, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gives_minus_one_and_its_neighbours_their_token(
    value: float, temperature: float
) -> None:
    """O86; the neighbours' tokens are those they have alone."""
    logits = np.random.default_rng(2).normal(0, 3, (4, 20))
    alone = [
        int(draw(logits[[row]], temperature=temperature, positions=[row])[0][0]) for row in range(4)
    ]
    logits[1, 7] = value
    logits[3, 19] = value

    ids, logprobs = draw(logits, temperature=temperature)

    assert ids.tolist() == [alone[0], -1, alone[2], -1]
    assert np.isfinite(logprobs[[0, 2]]).all()


@pytest.mark.parametrize("top_k", [0, 1, 3, 1_000])
@pytest.mark.parametrize("top_p", [0.0, 0.35, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_draws_follow_the_filtered_distribution(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """O23, O25: what the filters keep is drawn as often as its probability says."""
    row = np.random.default_rng(3).normal(0, 1.5, 12)
    want = kept_by_hand(row.astype(np.float32), temperature, top_k, top_p, min_p)

    got = many_draws(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    assert got.keys() <= want.keys()
    for i, share in want.items():
        # five standard deviations of a share over 20,000 draws
        assert got.get(i, 0.0) == pytest.approx(share, abs=5 * math.sqrt(share / 20_000) + 1e-9)


def test_equal_logits_at_the_border_of_top_k_stay_from_the_low_end() -> None:
    row = np.array([1.0, 3.0, 1.0, 3.0, 1.0, 1.0])

    assert set(many_draws(row, count=500, top_k=4)) == {0, 1, 2, 3}
    assert set(many_draws(row, count=500, top_k=1)) == {1}
    assert set(many_draws(np.zeros(6), count=500, top_p=0.5)) == {0, 1, 2}


def test_top_p_zero_keeps_the_most_likely_token() -> None:
    """O23."""
    row = np.random.default_rng(4).normal(0, 0.01, 30)

    assert set(many_draws(row, count=500, top_p=0.0)) == {int(row.argmax())}


def test_a_draw_is_a_function_of_seed_choice_and_position_only() -> None:
    """O30: neighbours, their settings and the row's place in the batch do not matter."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (9, 50))
    seeds = list(range(100, 109))
    together, logprobs = draw(logits, seeds=seeds, top_p=0.9, positions=[7] * 9)

    for row in range(9):
        alone = draw(logits[[row]], seeds=[seeds[row]], top_p=0.9, positions=[7])
        assert alone[0][0] == together[row]
        assert alone[1][0] == logprobs[row]
    shuffled = rng.permutation(9)
    again, _ = draw(
        logits[shuffled], seeds=[seeds[i] for i in shuffled], top_p=0.9, positions=[7] * 9
    )
    assert again.tolist() == together[shuffled].tolist()


def test_a_greedy_neighbour_changes_nothing() -> None:
    logits = np.random.default_rng(6).normal(0, 2, (4, 50))

    mixed, _ = draw(logits, temperature=[0.0, 1.0, 0.0, 1.0])

    assert mixed[[1, 3]].tolist() == draw(logits)[0][[1, 3]].tolist()
    assert mixed[[0, 2]].tolist() == draw(logits, temperature=0.0)[0][[0, 2]].tolist()


def test_other_seeds_choices_and_positions_give_other_numbers() -> None:
    """O30: streams that share a part of their key have nothing in common."""
    counters = np.array([(c, p) for c in range(10) for p in range(100)], np.uint32)
    per_seed = [
        uniforms(np.full(1_000, s, np.uint64), counters) for s in (0, 1, 2, 2**63, 2**64 - 1)
    ]
    every = np.concatenate(per_seed)

    assert len(np.unique(every)) == len(every)
    for a in range(5):
        for b in range(a):
            assert abs(np.corrcoef(per_seed[a], per_seed[b])[0, 1]) < 0.12


def test_the_numbers_are_uniform() -> None:
    """Chi square over 64 cells of positions 0.. of one seed: within five standard deviations."""
    counters = np.zeros((64_000, 2), np.uint32)
    counters[:, 1] = np.arange(64_000)

    numbers = uniforms(np.full(64_000, 42, np.uint64), counters)

    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    cells = np.bincount((numbers * 64).astype(int), minlength=64)
    chi = float(((cells - 1_000.0) ** 2 / 1_000.0).sum())
    assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


def test_the_numbers_are_these() -> None:
    """Recorded once: a replay after an update of the server continues with the same tokens."""
    numbers = uniforms(
        np.array([0, 1, 2**64 - 1], np.uint64),
        np.array([(0, 0), (1, 7), (0, 2**32 - 1)], np.uint32),
    )

    assert numbers.tolist() == [0.28176129772258496, 0.6212972630268686, 0.6576729889456807]


@pytest.mark.parametrize("usable", [1, 3, 1_000])
def test_the_largest_chance_takes_the_last_id_that_is_kept(usable: int) -> None:
    """And never one beyond it, nor one that a filter took out."""
    off = np.zeros(1, np.float32)
    z = np.zeros((1, usable + 1), np.float32)
    z[0, -1] = -np.inf

    ids = _draw(z, off + 1, off + 1, off.astype(np.int32), off, np.array([1.0 - 2.0**-53]))

    assert ids.tolist() == [usable - 1]


def test_top_p_of_one_keeps_all_beside_a_row_that_does_not() -> None:
    """Also what is too unlikely to show in a sum: 1 + exp(-60) is 1."""
    z = np.array([[0.0, -60.0], [0.0, -60.0]], np.float32)

    head = _head(
        z, np.zeros((2, 1), np.float32), np.array([1.0, 0.5], np.float32), np.zeros(2, np.int32)
    )

    assert head.tolist() == [[True, True], [True, False]]


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="every column needs 2 rows"):
        sample(
            np.zeros((2, 5), np.float32),
            temperature=np.zeros(3, np.float32),
            top_p=np.ones(2, np.float32),
            top_k=np.zeros(2, np.int32),
            min_p=np.zeros(2, np.float32),
            seeds=np.zeros(2, np.uint64),
            counters=np.zeros((2, 2), np.uint32),
            banned=(),
            usable=5,
        )

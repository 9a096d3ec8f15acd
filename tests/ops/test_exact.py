"""With the exact ops a row has the same bits alone, in any company, and wherever its text was cut.

The reference goes through the same questions and fails them: they can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.device.device import Array
from engine.ops import exact, reference
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from engine.ops.spec import Ops, Rows
from tests.fakes.decoder import a_device, rows_of
from tests.ops.cases import normal, rng

Run = Callable[[Array], tuple[Array, ...]]


def bits(arrays: Sequence[Array]) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


# -- rows by themselves ----------------------------------------------------------------------------


ROWS = 40


@dataclass(frozen=True, slots=True)
class Rowwise:
    """An op whose rows have nothing to do with one another: `make` packs, the run takes rows."""

    label: str
    make: Callable[[Ops], Run]
    felt: bool = True  # the reference may round a row differently beside others


def of_linear(ins: int, outs: int, *, bias: bool = False) -> Rowwise:
    x, w, b = normal(ROWS, ins), normal(outs, ins, seed=1), normal(outs, seed=2)

    def make(ops: Ops) -> Run:
        packed = ops.pack(w, b if bias else None)
        return lambda at: (ops.linear(x[at], packed),)

    return Rowwise(f"linear {ins} -> {outs}", make)


def of_heads(heads: int, ins: int, outs: int) -> Rowwise:
    x, w = normal(ROWS, heads, ins), normal(heads, ins, outs, seed=1)

    def make(ops: Ops) -> Run:
        packed = ops.pack_heads(w)
        return lambda at: (ops.head_linear(x[at], packed),)

    return Rowwise(f"head_linear {heads} x {ins} -> {outs}", make)


def of_hyper(n: int, hidden: int, steep: float) -> Rowwise:
    x, outs = normal(ROWS, n + 1, hidden), 2 * n + n * n
    fn, base = normal(outs, n * hidden, seed=1, scale=steep), normal(outs, seed=2)
    scale, norm = np.array([0.7, 1.3, 0.9], np.float32), normal(hidden, seed=3)

    def make(ops: Ops) -> Run:
        w = ops.pack_hyper(fn, base, scale, norm)
        return lambda at: ops.hyper_in(x[at], w, norm_eps=1e-5, eps=1e-6, rounds=20)

    return Rowwise(f"hyper_in {n} x {hidden}, steep {steep}", make)


def of_experts(count: int, active: int, hidden: int, inner: int, shared: int) -> Rowwise:
    x = normal(ROWS, hidden)
    gate_up, down = normal(count, 2 * inner, hidden, seed=1), normal(count, hidden, inner, seed=2)
    into, back = normal(2 * shared * inner, hidden, seed=3), normal(hidden, shared * inner, seed=4)
    chosen = np.stack([rng(row).permutation(count)[:active] for row in range(ROWS)])
    weights = rng(5).random((ROWS, active)).astype(np.float32)

    def make(ops: Ops) -> Run:
        w = ops.pack_experts(gate_up, down, into, back)
        return lambda at: (ops.experts(x[at], chosen[at].astype(np.int32), weights[at], w, 10.0),)

    return Rowwise(f"experts {active} of {count}, shared {shared} x", make)


def of_route(count: int, active: int, groups: int, top: int) -> Rowwise:
    logits, bias = normal(ROWS, count, scale=3), normal(count, seed=1, scale=0.3)
    more: dict[str, Any] = {"scale": 2.5, "normalise": True, "groups": groups, "top_groups": top}

    def make(ops: Ops) -> Run:
        return lambda at: ops.route(logits[at], bias, active=active, **more)

    return Rowwise(f"route {active} of {count}, {top} of {groups}", make, felt=top == groups)


def of(op: str, *inputs: Array, felt: bool = False, **more: Any) -> Rowwise:
    """An op of one array by rows and of others that are the same for each."""
    x, rest = inputs[0], inputs[1:]

    def make(ops: Ops) -> Run:
        def run(at: Array) -> tuple[Array, ...]:
            got = getattr(ops, op)(x[at], *rest, **more)
            return got if isinstance(got, tuple) else (got,)

        return run

    return Rowwise(op, make, felt)


def of_pairs(op: str, *inputs: Array) -> Rowwise:
    """An op all of whose arrays go by rows."""

    def make(ops: Ops) -> Run:
        return lambda at: (getattr(ops, op)(*(x[at] for x in inputs)),)

    return Rowwise(op, make, felt=False)


def of_pool_scores() -> Rowwise:
    q, weights, keys = normal(ROWS, 4, 32), normal(ROWS, 4), normal(150, 32, seed=1)

    def make(ops: Ops) -> Run:
        home: Any = exact.attention if isinstance(ops, ExactOps) else reference.indexer

        def run(at: Array) -> tuple[Array, ...]:
            if len(at) % 2:  # keys that all share, and keys of each row's own, more of them
                return (home.pool_scores(q[at], weights[at], keys[:130])[:, :130],)
            own = np.broadcast_to(keys, (len(at), *keys.shape))
            return (home.pool_scores(q[at], weights[at], own)[:, :130],)

        return run

    return Rowwise("pool scores", make)


def of_gates(bound: float | None) -> Rowwise:
    f, b = normal(ROWS, 192, scale=4), normal(ROWS, 6, seed=1, scale=4)
    rate, bias = np.exp(normal(192, seed=2)), normal(192, seed=3)

    def make(ops: Ops) -> Run:
        return lambda at: ops.kda_gates(f[at], b[at], rate, bias, bound)

    return Rowwise(f"kda_gates, bound {bound}", make, felt=False)


def of_kda_out() -> Rowwise:
    o, gate, weight = normal(ROWS, 6, 32), normal(ROWS, 192, seed=1), normal(32, seed=2)

    def make(ops: Ops) -> Run:
        return lambda at: (ops.kda_out(o[at], gate[at], weight, 1e-5),)

    return Rowwise("kda_out", make, felt=False)


def of_sample() -> Rowwise:
    logits, seeds = normal(ROWS, 900, scale=4), np.arange(ROWS, dtype=np.uint64)
    columns = {
        "temperature": rng(1).random(ROWS).astype(np.float32),
        "top_p": np.full(ROWS, 0.9, np.float32),
        "top_k": np.full(ROWS, 50, np.int32),
        "min_p": np.full(ROWS, 0.01, np.float32),
        "counters": np.ones((ROWS, 2), np.uint32),
    }

    def make(ops: Ops) -> Run:
        def run(at: Array) -> tuple[Array, ...]:
            some = {name: column[at] for name, column in columns.items()}
            return ops.sample(logits[at], seeds=seeds[at], banned=(), usable=890, **some)

        return run

    return Rowwise("sample", make, felt=False)


ROWWISE = [
    of_linear(192, 966),
    of_linear(768, 24),
    of_linear(449, 65, bias=True),
    of_linear(192, 8, bias=True),
    of_heads(2, 32, 192),
    of_heads(4, 48, 64),
    of_hyper(4, 192, 0.02),
    of_hyper(4, 64, 30.0),
    of_hyper(3, 64, 0.02),
    of_experts(8, 2, 192, 48, 1),
    of_experts(20, 3, 64, 16, 2),
    of_route(8, 2, 1, 1),
    of_route(40, 12, 4, 2),
    of_pool_scores(),
    of("rms_norm", normal(ROWS, 192), normal(192, seed=1), eps=1e-5, felt=True),
    of("layer_norm", normal(ROWS, 33), normal(33, seed=1), normal(33, seed=2), eps=1e-6),
    of("swiglu", normal(ROWS, 96), limit=10.0),
    of("gelu", normal(ROWS, 33)),
    of("hyper_expand", normal(ROWS, 64), streams=4),
    of("hyper_mean", normal(ROWS, 5, 192)),
    of_pairs("add", normal(ROWS, 33), normal(ROWS, 33, seed=1)),
    of_pairs("rotate_half", normal(ROWS, 3, 8), normal(ROWS, 8), normal(ROWS, 8, seed=1)),
    of_gates(-5.0),
    of_gates(None),
    of_kda_out(),
    of_sample(),
]


def of_hyper_out() -> Rowwise:
    x, y, mix = normal(ROWS, 5, 192), normal(ROWS, 192, seed=1), normal(ROWS, 4, 5, seed=2)

    def make(ops: Ops) -> Run:
        return lambda at: (ops.hyper_out(x[at], y[at], mix[at])[:, :4],)

    return Rowwise("hyper_out", make, felt=False)


ROWWISE.append(of_hyper_out())


def changed_rows(case: Rowwise, ops: Ops) -> int:
    """How often a row in company differs from itself alone: any place in batches of any size."""
    run, changed = case.make(ops), 0
    for row in range(0, ROWS, 3):
        alone = bits(run(np.array([row])))
        others = rng(row).permutation([other for other in range(ROWS) if other != row])
        for size in (2, 5, 16) if row % 2 else (3, 4, 7, ROWS):
            for place in {0, size // 2, size - 1}:
                at = np.insert(others[: size - 1], place, row)
                changed += bits([array[place : place + 1] for array in run(at)]) != alone
    return changed


@pytest.mark.parametrize("case", ROWWISE, ids=lambda case: case.label)
def test_a_row_has_the_same_bits_alone_and_in_any_company(case: Rowwise) -> None:
    """D9: in batches of 2, 3, 4, 5, 7, 16 and 40 rows, first, in the middle and last."""
    assert changed_rows(case, ExactOps(a_device())) == 0


def test_the_reference_lets_rows_feel_their_company() -> None:
    """The red arm; a BLAS kernel may spare one or another, but none spares most."""
    asked = [case for case in ROWWISE if case.felt]
    felt = [case for case in asked if changed_rows(case, ReferenceOps(a_device()))]
    assert len(felt) > len(asked) / 2, [case.label for case in felt]


# -- rows of a text --------------------------------------------------------------------------------


TOKENS = 200
PAGE = 16
SEQUENCES = 16
Feed = Callable[[Rows], tuple[Array, ...]]


@dataclass(frozen=True, slots=True)
class Textual:
    """An op with a memory of the text; `begin` makes one that has seen nothing."""

    label: str
    begin: Callable[[Ops], Feed]
    felt: bool = True


@cache
def tokens(shape: tuple[int, ...], seed: int) -> Array:
    return normal(SEQUENCES, TOKENS, *shape, seed=seed)


def token(rows: Rows, *shape: int, seed: int = 0) -> Array:
    """What each row of a step brings: a function of its sequence and position alone."""
    return tokens(shape, seed)[rows.slots[rows.owners], rows.positions]


def pages(width: int, per_page: int = PAGE) -> Array:
    count = SEQUENCES * (-(-TOKENS // PAGE))
    return np.full((count, per_page, width), np.nan, np.float32)


def of_conv() -> Textual:
    kernel = normal(4, 96, seed=9)

    def begin(ops: Ops) -> Feed:
        window = np.full((SEQUENCES, 3, 96), np.nan, np.float32)
        return lambda rows: (ops.short_conv(token(rows, 96), kernel, window, rows),)

    return Textual("short_conv", begin, felt=False)


def of_kda() -> Textual:
    def begin(ops: Ops) -> Feed:
        state = np.full((SEQUENCES, 3, 32, 32), np.nan, np.float32)

        def feed(rows: Rows) -> tuple[Array, ...]:
            g = -np.abs(token(rows, 3, 32, seed=1))
            beta = 1 / (1 + np.exp(token(rows, 3, seed=2)))
            return (ops.kda(token(rows, 3, 3, 32), g, beta, state, rows),)

        return feed

    return Textual("kda", begin)


def of_dsa(top: int, pool: int = 4) -> Textual:
    """Write, pool, select, attend: as a layer does it."""
    ape = normal(pool, 32, seed=9)

    def begin(ops: Ops) -> Feed:
        latents, keys, gates = pages(48), pages(32), pages(32)
        valid, pooled = np.zeros(keys.shape[:2], np.uint8), pages(32, PAGE // pool)

        def feed(rows: Rows) -> tuple[Array, ...]:
            ops.write_rows(latents, token(rows, 48), rows)
            key, gate = token(rows, 32, seed=1), token(rows, 32, seed=2)
            ops.index_write(keys, gates, valid, key, gate, rows)
            ops.index_pool(pooled, keys, gates, valid, ape, rows)
            q, weights = token(rows, 3, 32, seed=3), token(rows, 3, seed=4)
            selected = ops.index_select(q, weights, pooled, rows, pool=pool, top_tokens=top)
            asks = token(rows, 3, 48, seed=5)
            seen = ops.latent_attention(asks, latents, selected, rows, scale=0.2)
            width = top + pool - 1
            listed = np.full((len(asks), width), -1, np.int32)
            line = np.arange(width)
            short = np.where(line <= rows.positions[:, None], line, -1)
            listed[:] = short if selected is None else selected
            return seen, listed

        return feed

    return Textual(f"select {top} and attend", begin)


TEXTUAL = [of_conv(), of_kda(), of_dsa(64), of_dsa(256)]
CUTS = [[1], [7], [64], [13, 1, 99, 2, 70, 15], [150, 1]]
COMPANY = [(2, 0), (2, 1), (3, 1), (5, 4), (16, 0), (16, 15)]  # sequences together, which place


def read(op: Textual, ops: Ops, cuts: Sequence[int], company: tuple[int, int] = (1, 0)) -> Any:
    """What each token of sequence 0 gets; others go one token a step beside it from their own 30th.

    Sizes of `cuts` take turns; the last repeats. Where it is one token it is a decode row, in its
    place among the others; a longer piece comes behind them.
    """
    feed, (size, place) = op.begin(ops), company
    table = rng(7).permutation(SEQUENCES * 13).reshape(SEQUENCES, 13)
    others, lengths = list(range(1, size)), [0] * SEQUENCES
    for other in others:
        lengths[other] = 3 * other
        feed(step_of([(other, 0, lengths[other])], table))
    rows_seen: list[list[bytes]] = []
    turn = 0
    while lengths[0] < TOKENS:
        count = min(cuts[min(turn, len(cuts) - 1)], TOKENS - lengths[0])
        turn += 1
        beside = [other for other in others if lengths[other] < TOKENS]
        work = [(other, lengths[other], 1) for other in beside]
        seat = min(place, len(work)) if count == 1 else len(work)
        work.insert(seat, (0, lengths[0], count))
        got = feed(step_of(work, table))
        rows_seen += [bits([x[seat + i] for x in got]) for i in range(count)]
        for slot, _, length in work:
            lengths[slot] += length
    return rows_seen


def step_of(work: Sequence[tuple[int, int, int]], table: Array) -> Rows:
    """A step over (slot, context, length)."""
    slots = [slot for slot, _, _ in work]
    return rows_of(
        [(context, length) for _, context, length in work],
        slots=slots,
        table=table[slots],
        fresh=[context == 0 for _, context, _ in work],
        page_tokens=PAGE,
    )


@pytest.mark.parametrize("op", TEXTUAL, ids=lambda op: op.label)
def test_a_cut_cannot_be_seen(op: Textual) -> None:
    """D9, R22, R30: chunks of 1, 7, 64, 99 and 150 tokens, decode rows behind them, and whole."""
    ops = ExactOps(a_device())
    whole = read(op, ops, [TOKENS])
    for cuts in CUTS:
        assert read(op, ops, cuts) == whole, cuts


@pytest.mark.parametrize("op", TEXTUAL, ids=lambda op: op.label)
def test_company_cannot_be_seen(op: Textual) -> None:
    """D9: longer and shorter texts beside it, pruned and whole ones, decode rows and a prompt."""
    ops = ExactOps(a_device())
    alone = read(op, ops, [TOKENS])
    for company in COMPANY:
        assert read(op, ops, [100, 1], company) == alone, company


@pytest.mark.parametrize("op", [op for op in TEXTUAL if op.felt], ids=lambda op: op.label)
def test_the_reference_shows_a_cut(op: Textual) -> None:
    """The red arm."""
    ops = ReferenceOps(a_device())
    assert read(op, ops, [7]) != read(op, ops, [TOKENS])


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, 16])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_python_floats_and_arrays_balance_alike(rows: int, rounds: int) -> None:
    """Few rows go without arrays; every float64 operation is the same, in the same order."""
    e = np.exp(normal(rows, 24, scale=4))
    few, many = np.empty((2, rows, 4, 5), np.float32)
    pre_few = exact.pointwise.of_few(e, 1e-6, rounds, few)
    pre_many = exact.pointwise.of_many(e, 4, 1e-6, rounds, many)
    assert bits([few, pre_few]) == bits([many, pre_many])

"""The NumPy backends answer as plain loops do, on every case of every op."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from engine.errors import ShapeMismatch
from engine.ops.exact.ops import ExactOps
from engine.ops.reference.ops import ReferenceOps
from engine.ops.spec import Ops
from tests.fakes.decoder import a_device, rows_of
from tests.ops.cases import CASES, PACKERS, Case, normal


@pytest.fixture(params=[ReferenceOps, ExactOps])
def ops(request: pytest.FixtureRequest) -> Ops:
    made: Ops = request.param(a_device())
    return made


EVERY = [pytest.param(case, id=f"{op}: {case.label}") for op in CASES for case in CASES[op]]


@pytest.mark.parametrize("case", EVERY)
def test_an_op_means_what_plain_loops_say(case: Case, ops: Ops) -> None:
    for got, want in zip(case.got(ops), case.want(), strict=True):
        if want is None or isinstance(want, bool):
            assert got is want
        else:
            np.testing.assert_allclose(got, want, atol=case.atol, rtol=case.rtol)


def test_no_op_is_without_cases() -> None:
    """Principle 2: an op without a case has no definition."""
    named = {name for name, _ in inspect.getmembers(Ops, inspect.isfunction)}
    named = {name for name in named if not name.startswith("_")}
    assert CASES.keys() | PACKERS.keys() == named
    assert all(CASES[op] for op in CASES)
    assert set(PACKERS.values()) <= CASES.keys()


def test_a_result_stays_when_the_op_runs_again(ops: Ops) -> None:
    """Results are new arrays: a second call must not write into the first one's (R31)."""
    first = ops.linear(normal(2, 4), w := ops.pack(normal(3, 4, seed=1)))
    before = first.copy()
    ops.linear(normal(2, 4, seed=2), w)
    np.testing.assert_array_equal(first, before)


def test_equal_scores_select_the_same_set_in_a_hundred_runs(ops: Ops) -> None:
    """R20: higher score first, then the lower pool number."""
    rows = rows_of([(40, 1)])
    pooled = np.ones((4, 4, 8), np.float32)
    q, weights = np.ones((1, 2, 8), np.float32), np.ones((1, 2), np.float32)
    for _ in range(100):
        selected = ops.index_select(q, weights, pooled, rows, pool=4, top_tokens=8)
        assert selected is not None
        assert selected.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 40, -1, -1]]


def test_rows_of_one_pass_select_as_single_passes_do(ops: Ops) -> None:
    """R19, R22: later rows of the pass are invisible, and each row has its own tail."""
    q, weights = normal(9, 3, 8), normal(9, 3, seed=1)
    pooled = normal(4, 4, 8, seed=2)
    whole = ops.index_select(q, weights, pooled, rows_of([(30, 9)]), pool=4, top_tokens=8)
    assert whole is not None
    for row in range(9):
        one = slice(row, row + 1)
        alone = ops.index_select(
            q[one], weights[one], pooled, rows_of([(30 + row, 1)]), pool=4, top_tokens=8
        )
        assert alone is not None
        np.testing.assert_array_equal(whole[one], alone)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 15, 16, 18, 19])
def test_short_sequences_are_dense(ops: Ops, tokens: int) -> None:
    """R23: while all visible tokens fit, each of them is selected."""
    others = [(60, 1), (tokens - 1, 1)]  # a long one beside it, so that a selection is made
    rows = rows_of(others, page_tokens=64)
    selected = ops.index_select(
        normal(2, 3, 8), normal(2, 3), normal(4, 16, 8), rows, pool=4, top_tokens=16
    )
    assert selected is not None
    assert [p for p in selected[1].tolist() if p >= 0] == list(range(tokens))


def test_one_token_more_than_fits_may_lose_a_pool(ops: Ops) -> None:
    """R23: at T + P visible tokens one pool is missing."""
    rows = rows_of([(19, 1)], page_tokens=64)
    selected = ops.index_select(
        normal(1, 3, 8), normal(1, 3), normal(1, 16, 8), rows, pool=4, top_tokens=16
    )
    assert selected is not None
    assert np.count_nonzero(selected >= 0) == 16


MISFITS = {
    "linear": lambda ops: ops.linear(normal(2, 3), ops.pack(normal(5, 4))),
    "head_linear": lambda ops: ops.head_linear(normal(2, 3, 4), ops.pack_heads(normal(2, 4, 5))),
    "rms_norm": lambda ops: ops.rms_norm(normal(2, 3), normal(4), 0.1),
    "add": lambda ops: ops.add(normal(2, 3), normal(3)),
    "swiglu": lambda ops: ops.swiglu(normal(2, 3), None),
    "lay_rows": lambda ops: ops.lay_rows(normal(2, 3), normal(2, 3), ((1, 0, 2),)),
    "segment_attention": lambda ops: ops.segment_attention(
        *(normal(4, 1, 2),) * 3, (3,), scale=1.0
    ),
    "kda": lambda ops: ops.kda(
        normal(1, 3, 2, 4), normal(1, 2, 4), normal(1, 2), normal(1, 2, 3, 4), rows_of([(0, 1)])
    ),
    "write_rows": lambda ops: ops.write_rows(normal(1, 16, 4), normal(2, 4), rows_of([(0, 1)])),
    "pack_experts": lambda ops: ops.pack_experts(
        normal(2, 6, 5), normal(2, 5, 3), normal(8, 5), normal(5, 4)
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit_are_refused(name: str, ops: Ops) -> None:
    with pytest.raises(ShapeMismatch):
        MISFITS[name](ops)

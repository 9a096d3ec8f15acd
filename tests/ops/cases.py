"""Shapes and dtypes for every op of the seam: small, odd, empty where allowed, longest where cheap.

A case makes its inputs from a seed, runs the op of any backend, and knows the answer of plain
loops. A CUDA backend is held to the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device.device import Array
from engine.ops.spec import Ops, Rows
from tests.fakes.decoder import rows_of
from tests.ops import plain

Answer = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One call: `got` by a backend, `want` by plain loops; both give results and changed arrays."""

    label: str
    got: Callable[[Ops], Answer]
    want: Callable[[], Answer]
    atol: float = 2e-6
    rtol: float = 2e-5


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng([53, *seed])


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (rng(seed, *shape).standard_normal(shape) * scale).astype(np.float32)


# one sequence's prompt, many answers, both at once, ragged chunks, a context behind
STEPS = {
    "one token": [(0, 1)],
    "a first prompt": [(0, 21)],
    "a whole chunk": [(16, 16)],
    "answers alone": [(3, 1), (40, 1), (0, 1), (17, 1), (8, 1)],
    "answers beside prompts": [(5, 1), (33, 1), (0, 19), (7, 33), (30, 1)],
}


def step(name: str, **more: Any) -> Rows:
    """A step whose sequences lie in scattered slots and pages."""
    segments = STEPS[name]
    count = len(segments)
    pages = 4
    table = rng(7, count).permutation(count * pages).reshape(count, pages)
    slots = rng(8, count).permutation(count + 1)[:count]
    fresh = [context == 0 for context, _ in segments]
    return rows_of(segments, slots=slots.tolist(), table=table, fresh=fresh, **more)


def paged(width: int, rows: Rows, seed: int, *, per_page: int | None = None) -> Array:
    """Pages with NaN wherever no row of a sequence was ever written (R5, R17)."""
    per_page = per_page or rows.page_tokens
    ratio = rows.page_tokens // per_page
    pages = np.full((int(rows.table.max()) + 1, per_page, width), np.nan, np.float32)
    for number, (_, length, context, _slot) in enumerate(rows.segments):
        for place in range((context + length) // ratio):
            page, offset = divmod(place, per_page)
            pages[rows.table[number, page], offset] = normal(width, seed=seed * 1000 + place)
    return pages


def simple(op: str, label: str, *args: Any, want: Callable[[], Any], **kwargs: Any) -> Case:
    return Case(label, lambda ops: (getattr(ops, op)(*args, **kwargs),), lambda: (want(),))


def linear_case(rows: int, ins: int, outs: int, *, bias: bool) -> Case:
    x, w = normal(rows, ins), normal(outs, ins, seed=1)
    b = normal(outs, seed=2) if bias else None
    return Case(
        f"{rows} x {ins} -> {outs}{' + bias' if bias else ''}",
        lambda ops: (ops.linear(x, ops.pack(w, b)),),
        lambda: (plain.linear(x, w, b),),
        atol=2e-5,
    )


def head_case(rows: int, heads: int, ins: int, outs: int) -> Case:
    x, w = normal(rows, heads, ins), normal(heads, ins, outs, seed=1)
    return Case(
        f"{rows} rows, {heads} heads {ins} -> {outs}",
        lambda ops: (ops.head_linear(x, ops.pack_heads(w)),),
        lambda: (plain.head_linear(x, w),),
        atol=1e-5,
    )


def hyper_case(rows: int, n: int, hidden: int, *, rounds: int, eps: float, steep: float) -> Case:
    outs = 2 * n + n * n
    x = normal(rows, n + 1, hidden)
    fn, base = normal(outs, n * hidden, seed=1, scale=steep), normal(outs, seed=2)
    scale, norm = np.array([0.7, 1.3, 0.9], np.float32), normal(hidden, seed=3)
    settings: dict[str, Any] = {"norm_eps": 0.02, "eps": eps, "rounds": rounds}

    def want() -> Answer:
        pre, post, comb = plain.hyper(x[:, :n], fn, base, scale, 0.02, eps, rounds)
        u = np.einsum("rn,rnh->rh", pre, x[:, :n].astype(np.float64))
        mix = np.concatenate([comb.transpose(0, 2, 1), post[:, :, None]], axis=2)
        return plain.rms_norm(u, norm, 0.02), mix

    return Case(
        f"{rows} rows of {n} x {hidden}, {rounds} rounds, eps {eps}, steep {steep}",
        lambda ops: ops.hyper_in(x, ops.pack_hyper(fn, base, scale, norm), **settings),
        want,
        atol=2e-5 if steep < 1 else 5e-4,
    )


def hyper_out_case(rows: int, n: int, hidden: int) -> Case:
    x, y, mix = normal(rows, n + 1, hidden), normal(rows, hidden, seed=1), normal(rows, n, n + 1)
    comb, post = mix[:, :, :n].transpose(0, 2, 1), mix[:, :, n]
    return Case(
        f"{rows} rows of {n} x {hidden}",
        lambda ops: (ops.hyper_out(x.copy(), y, mix)[:, :n],),
        lambda: (plain.hyper_out(x[:, :n], y, post, comb),),
    )


def lay_case() -> Case:
    x, rows = normal(9, 5), normal(6, 5, seed=1)
    spans = ((1, 0, 2), (4, 2, 1), (6, 3, 3))

    def got(ops: Ops) -> Answer:
        out = x.copy()
        ops.lay_rows(out, rows, spans)
        return (out,)

    def want() -> Answer:
        out = x.copy()
        for place, row, count in spans:
            for i in range(count):
                out[place + i] = rows[row + i]
        return (out,)

    return Case("three spans", got, want, atol=0.0, rtol=0.0)


def finite_case(value: float) -> Case:
    x = normal(3, 4)
    x[1, 2] = value
    want = value not in (float("inf"), float("-inf")) and value == value
    return Case(str(value), lambda ops: (ops.is_finite(x),), lambda: (want,))


def conv_case(name: str, taps: int, channels: int) -> Case:
    rows = step(name)
    x, kernel = normal(int(rows.starts[-1]), channels), normal(taps, channels, seed=1)
    window = normal(len(rows.slots) + 1, taps - 1, channels, seed=2)
    window[rows.slots[rows.fresh]] = np.nan  # a fresh sequence must not read it

    def got(ops: Ops) -> Answer:
        state = window.copy()
        return ops.short_conv(x, kernel, state, rows), state[rows.slots]

    def want() -> Answer:
        out, state = plain.short_conv(x, kernel, window, rows)
        return out, state[rows.slots]

    return Case(f"{name}, {taps} taps, {channels} channels", got, want)


def gates_case(rows: int, heads: int, dim: int, bound: float | None) -> Case:
    f, b = normal(rows, heads * dim, scale=8), normal(rows, heads, seed=1, scale=40)
    rate, bias = np.exp(normal(heads * dim, seed=2)), normal(heads * dim, seed=3)
    return Case(
        f"{rows} rows, bound {bound}",
        lambda ops: ops.kda_gates(f, b, rate, bias, bound),
        lambda: plain.kda_gates(f, b, rate, bias, bound),
    )


def kda_case(name: str, heads: int, dim: int, *, decay: float) -> Case:
    rows = step(name)
    count = int(rows.starts[-1])
    qkv = normal(count, 3, heads, dim)
    g = -decay * rng(1).random((count, heads, dim)).astype(np.float32)
    beta = rng(2).random((count, heads)).astype(np.float32)
    memory = normal(len(rows.slots) + 1, heads, dim, dim, seed=3)
    memory[rows.slots[rows.fresh]] = np.nan

    def got(ops: Ops) -> Answer:
        state = memory.copy()
        return ops.kda(qkv, g, beta, state, rows), state[rows.slots]

    def want() -> Answer:
        out, state = plain.kda(qkv, g, beta, memory, rows)
        return out, state[rows.slots]

    return Case(f"{name}, {heads} heads of {dim}, decay {decay}", got, want, atol=1e-5)


def alike_keys_case() -> Case:
    """Keys that are all the same: where product forms of the inverse lose their digits (C5)."""
    rows = rows_of([(0, 48)], fresh=[True])
    qkv = np.tile(normal(1, 3, 2, 8), (48, 1, 1, 1))
    g, beta = np.full((48, 2, 8), -1e-4, np.float32), np.full((48, 2), 0.99, np.float32)

    def got(ops: Ops) -> Answer:
        state = np.zeros((1, 2, 8, 8), np.float32)
        return ops.kda(qkv, g, beta, state, rows), state

    return Case(
        "keys alike", got, lambda: plain.kda(qkv, g, beta, np.zeros((1, 2, 8, 8)), rows), atol=1e-5
    )


def write_case(name: str, width: int) -> Case:
    rows = step(name)
    pages, values = paged(width, rows, 1), normal(int(rows.starts[-1]), width)

    def got(ops: Ops) -> Answer:
        out = pages.copy()
        ops.write_rows(out, values, rows)
        return (np.nan_to_num(out),)

    def want() -> Answer:
        out = pages.copy()
        for row, sequence, position in plain.each_row(rows):
            out[plain.place_of(rows, sequence, position)] = values[row]
        return (np.nan_to_num(out),)

    return Case(name, got, want, atol=0.0, rtol=0.0)


def index_write_case(name: str, dim: int) -> Case:
    rows = step(name)
    keys, gates = paged(dim, rows, 1), paged(dim, rows, 2)
    valid = np.zeros(keys.shape[:2], np.uint8)
    key, gate = normal(int(rows.starts[-1]), dim), normal(int(rows.starts[-1]), dim, seed=1)

    def got(ops: Ops) -> Answer:
        out = keys.copy(), gates.copy(), valid.copy()
        ops.index_write(*out, key, gate, rows)
        return tuple(np.nan_to_num(array) for array in out)

    def want() -> Answer:
        out = keys.copy(), gates.copy(), valid.copy()
        for row, sequence, position in plain.each_row(rows):
            place = plain.place_of(rows, sequence, position)
            out[0][place], out[1][place], out[2][place] = key[row], gate[row], 1
        return tuple(np.nan_to_num(array) for array in out)

    return Case(name, got, want, atol=0.0, rtol=0.0)


def pool_case(name: str, pool: int, dim: int, *, invalid: bool, steep: float = 1.0) -> Case:
    rows = step(name)
    keys, gates, ape = paged(dim, rows, 1), paged(dim, rows, 2) * steep, normal(pool, dim, seed=3)
    valid = np.isfinite(keys[:, :, 0]).astype(np.uint8)
    if invalid:
        valid[:, ::3] = 0
        valid[:, :pool] = 0  # a pool without a valid row
        keys[valid == 0] = np.nan
    pooled = normal(len(keys), rows.page_tokens // pool, dim, seed=4)

    def got(ops: Ops) -> Answer:
        out = pooled.copy()
        ops.index_pool(out, keys, gates, valid, ape, rows)
        return (out,)

    def want() -> Answer:
        out = pooled.copy()
        for _, sequence, position in plain.each_row(rows):
            if position % pool == pool - 1:
                page, offset = plain.place_of(rows, sequence, position)
                out[page, offset // pool] = plain.pool_key(
                    keys, gates, valid, ape, rows, sequence, position // pool
                )
        return (out,)

    return Case(f"{name}, pools of {pool}, {dim} wide{', gaps' * invalid}", got, want)


def select_case(name: str, pool: int, top: int, *, tied: bool = False) -> Case:
    rows = step(name)
    heads, dim = 3, 8
    pooled = paged(dim, rows, 1, per_page=rows.page_tokens // pool)
    if tied:
        pooled[np.isfinite(pooled)] = 0.5
    q, weights = normal(int(rows.starts[-1]), heads, dim), normal(int(rows.starts[-1]), heads)
    short = all(context + length <= top + pool - 1 for context, length in STEPS[name])

    def want() -> Answer:
        return (None if short else plain.select(q, weights, pooled, rows, pool, top),)

    return Case(
        f"{name}, {top} tokens in pools of {pool}{', tied' * tied}",
        lambda ops: (ops.index_select(q, weights, pooled, rows, pool=pool, top_tokens=top),),
        want,
    )


def attention_case(name: str, *, top: int | None) -> Case:
    rows = step(name)
    heads, rank = 3, 6
    latents, q = paged(rank, rows, 1), normal(int(rows.starts[-1]), heads, rank, scale=3)
    selected = None
    if top is not None:
        selected = np.full((len(q), top + 3), -1, np.int32)
        for row, _, position in plain.each_row(rows):
            some = rng(row).permutation(position + 1)[: top + 3]
            selected[row, : len(some)] = some
    return Case(
        f"{name}, {'all' if top is None else top} keys",
        lambda ops: (ops.latent_attention(q, latents, selected, rows, scale=0.4),),
        lambda: (plain.latent_attention(q, latents, selected, rows, 0.4),),
    )


def long_attention_case(*, selected: bool) -> Case:
    """More keys than are masked, more queries than one block."""
    rows = rows_of([(1000, 150)], page_tokens=64)
    latents, q = paged(4, rows, 1), normal(150, 2, 4, scale=2)
    chosen = None
    if selected:
        chosen = np.stack([rng(i).permutation(1000 + i)[:40] for i in range(150)]).astype(np.int32)
    return Case(
        f"150 rows behind 1,000{', selected' * selected}",
        lambda ops: (ops.latent_attention(q, latents, chosen, rows, scale=0.5),),
        lambda: (plain.latent_attention(q, latents, chosen, rows, 0.5),),
    )


def segment_case(segments: tuple[int, ...]) -> Case:
    q, k, v = (normal(sum(segments), 3, 8, seed=i) for i in range(3))
    return simple(
        "segment_attention",
        str(segments),
        q,
        k,
        v,
        segments,
        scale=0.3,
        want=lambda: plain.segment_attention(q, k, v, segments, 0.3),
    )


def route_case(
    rows: int, count: int, active: int, *, groups: int = 1, top: int = 1, lower: float = 0.0
) -> Case:
    logits, bias = normal(rows, count), normal(count, seed=1, scale=0.3) - np.float32(lower)
    return Case(
        f"{rows} rows, {active} of {count}, {top} of {groups} groups, bias - {lower}",
        lambda ops: ops.route(
            logits,
            bias,
            active=active,
            scale=2.5,
            normalise=rows != 2,
            groups=groups,
            top_groups=top,
        ),
        lambda: plain.route(logits, bias, active, 2.5, rows != 2, groups, top),
    )


def route_tie_case(rows: int) -> Case:
    logits, bias = np.zeros((rows, 6), np.float32), np.array([0, 1, 0, 1, 0, 0], np.float32)
    settings: dict[str, Any] = {"scale": 1.0, "normalise": True, "groups": 1, "top_groups": 1}
    return Case(
        f"{rows} rows of equals",
        lambda ops: ops.route(logits, bias, active=3, **settings),
        lambda: plain.route(logits, bias, 3, 1.0, True, 1, 1),
    )


def experts_case(rows: int, count: int, active: int, *, shared: int, limit: float | None) -> Case:
    hidden, inner = 10, 6
    x = normal(rows, hidden)
    gate_up, down = normal(count, 2 * inner, hidden, seed=1), normal(count, hidden, inner, seed=2)
    into, back = normal(2 * shared * inner, hidden, seed=3), normal(hidden, shared * inner, seed=4)
    chosen = np.stack([rng(row).permutation(count)[:active] for row in range(rows)])
    chosen = chosen.astype(np.int32)
    weights = rng(5).random((rows, active)).astype(np.float32)
    return Case(
        f"{rows} rows, {active} of {count}, shared {shared} x, limit {limit}",
        lambda ops: (
            ops.experts(x, chosen, weights, ops.pack_experts(gate_up, down, into, back), limit),
        ),
        lambda: (plain.experts(x, chosen, weights, gate_up, down, (into, back), limit),),
        atol=5e-5,
    )


def sample_case(rows: int, vocab: int, usable: int) -> Case:
    """Greedy rows only; how draws are distributed is the sampler's own test."""
    logits = normal(rows, vocab)
    logits[:, usable - 1] = 9.0  # would win, but is banned in row 0
    wanted = logits.copy()

    def got(ops: Ops) -> Answer:
        return ops.sample(
            logits.copy(),
            temperature=np.zeros(rows, np.float32),
            top_p=np.ones(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            min_p=np.zeros(rows, np.float32),
            seeds=np.arange(rows, dtype=np.uint64),
            counters=np.zeros((rows, 2), np.uint32),
            banned=((0, usable - 1),),
            usable=usable,
        )

    def want() -> Answer:
        ids, logprobs = [], []
        for row in range(rows):
            allowed = [i for i in range(usable) if (row, i) != (0, usable - 1)]
            ids.append(max(allowed, key=lambda i: (wanted[row, i], -i)))
            total = np.log(np.exp(wanted[row].astype(np.float64)).sum())
            logprobs.append(float(wanted[row, ids[-1]]) - total)
        return np.array(ids), np.array(logprobs)

    return Case(f"{rows} rows of {vocab}, {usable} usable", got, want, atol=1e-5)


def norm_case(*shape: int) -> Case:
    x, w = normal(*shape), normal(shape[-1], seed=1)
    return simple("rms_norm", str(shape), x, w, 0.02, want=lambda: plain.rms_norm(x, w, 0.02))


def layer_norm_case(*shape: int) -> Case:
    x, w, b = normal(*shape), normal(shape[-1], seed=1), normal(shape[-1], seed=2)
    return simple(
        "layer_norm", str(shape), x, w, b, 1e-6, want=lambda: plain.layer_norm(x, w, b, 1e-6)
    )


def take_case(*ids: int) -> Case:
    x = normal(7, 3, 2)
    wanted = np.array(ids, np.int32)
    return simple(
        "take_rows",
        str(ids),
        x,
        wanted,
        want=lambda: np.array([x[i] for i in ids]).reshape(-1, 3, 2),
    )


def swiglu_case(limit: float | None) -> Case:
    x = normal(3, 14, scale=6)
    x[0, :2] = -300.0, 300.0
    return simple("swiglu", f"limit {limit}", x, limit, want=lambda: plain.swiglu(x, limit))


def rotate_case(rows: int) -> Case:
    x, cos, sin = normal(rows, 2, 6), normal(rows, 6, seed=1), normal(rows, 6, seed=2)
    return simple(
        "rotate_half", f"{rows} rows", x, cos, sin, want=lambda: plain.rotate_half(x, cos, sin)
    )


def kda_out_case(rows: int) -> Case:
    o, gate, w = normal(rows, 3, 8), normal(rows, 24, seed=1, scale=30), normal(8, seed=2)
    return simple(
        "kda_out", f"{rows} rows", o, gate, w, 0.02, want=lambda: plain.kda_out(o, gate, w, 0.02)
    )


X, Y = normal(3, 4, 5), normal(3, 4, 5, seed=1)
WIDE = np.concatenate([normal(200, scale=3), np.array([-30, -1e-4, 0, 1e-4, 30], np.float32)])
EXPANDED = normal(3, 6)
STREAMS = normal(5, 5, 6)

CASES: dict[str, list[Case]] = {
    "take_rows": [take_case(6), take_case(0, 0, 3), take_case()],
    "linear": [
        linear_case(1, 7, 5, bias=False),
        linear_case(1, 64, 33, bias=True),
        linear_case(2, 3, 1, bias=True),
        linear_case(2, 33, 70, bias=False),
        linear_case(3, 33, 70, bias=False),
        linear_case(19, 20, 65, bias=False),
    ],
    "head_linear": [head_case(1, 3, 5, 2), head_case(6, 2, 4, 7), head_case(17, 1, 1, 1)],
    "rms_norm": [norm_case(1, 5), norm_case(3, 7), norm_case(2, 3, 16), norm_case(4, 64)],
    "layer_norm": [
        layer_norm_case(1, 5),
        layer_norm_case(3, 7),
        layer_norm_case(2, 3, 16),
        layer_norm_case(4, 64),
    ],
    "add": [simple("add", "three axes", X, Y, want=lambda: X.astype(np.float64) + Y)],
    "swiglu": [swiglu_case(None), swiglu_case(1.5), swiglu_case(10.0)],
    "gelu": [simple("gelu", "wide", WIDE, want=lambda: plain.gelu(WIDE))],
    "hyper_expand": [
        Case(
            "three streams",
            lambda ops: (ops.hyper_expand(EXPANDED, 3)[:, :3],),
            lambda: (np.stack([EXPANDED] * 3, axis=1),),
        )
    ],
    "hyper_in": [
        hyper_case(1, 4, 12, rounds=20, eps=1e-6, steep=0.1),
        hyper_case(1, 4, 12, rounds=3, eps=0.004, steep=0.1),
        hyper_case(1, 4, 12, rounds=1, eps=0.004, steep=0.1),
        hyper_case(2, 4, 12, rounds=20, eps=0.004, steep=0.1),
        hyper_case(3, 4, 12, rounds=20, eps=1e-6, steep=0.1),
        hyper_case(7, 4, 12, rounds=20, eps=0.004, steep=0.1),
        hyper_case(7, 4, 12, rounds=1, eps=0.004, steep=0.1),
        hyper_case(5, 2, 9, rounds=4, eps=0.01, steep=0.1),
        hyper_case(1, 3, 9, rounds=4, eps=0.01, steep=0.1),
        hyper_case(1, 4, 12, rounds=5, eps=1e-3, steep=30.0),
        hyper_case(6, 4, 12, rounds=5, eps=1e-3, steep=30.0),
    ],
    "hyper_out": [hyper_out_case(1, 4, 8), hyper_out_case(9, 3, 5)],
    "hyper_mean": [simple("hyper_mean", "four", STREAMS, want=lambda: STREAMS[:, :4].mean(axis=1))],
    "lay_rows": [lay_case()],
    "is_finite": [finite_case(v) for v in (0.0, float("nan"), float("inf"), float("-inf"))],
    "rotate_half": [rotate_case(1), rotate_case(5)],
    "short_conv": [
        *[conv_case(name, 4, 6) for name in STEPS],
        conv_case("answers beside prompts", 2, 1),
    ],
    "kda_gates": [
        gates_case(1, 2, 3, -5.0),
        gates_case(6, 3, 4, -5.0),
        gates_case(6, 3, 4, None),
    ],
    "kda": [
        *[kda_case(name, 2, 8, decay=5.0) for name in STEPS],
        kda_case("answers beside prompts", 3, 4, decay=0.05),
        kda_case("answers beside prompts", 1, 5, decay=30.0),
        alike_keys_case(),
    ],
    "kda_out": [kda_out_case(1), kda_out_case(7)],
    "write_rows": [write_case(name, 3) for name in STEPS],
    "index_write": [index_write_case(name, 3) for name in STEPS],
    "index_pool": [
        *[pool_case(name, 4, 5, invalid=False) for name in STEPS],
        pool_case("answers beside prompts", 8, 3, invalid=False),
        pool_case("a first prompt", 4, 5, invalid=True),
        pool_case("a first prompt", 4, 5, invalid=False, steep=100.0),
    ],
    "index_select": [
        *[select_case(name, 4, 8) for name in STEPS],
        *[select_case(name, 4, 16) for name in STEPS],
        select_case("answers beside prompts", 2, 6),
        select_case("answers beside prompts", 4, 64),
        select_case("answers beside prompts", 4, 8, tied=True),
        select_case("answers alone", 4, 8, tied=True),
    ],
    "latent_attention": [
        *[attention_case(name, top=None) for name in STEPS],
        *[attention_case(name, top=8) for name in STEPS],
        long_attention_case(selected=False),
        long_attention_case(selected=True),
    ],
    "segment_attention": [segment_case((5,)), segment_case((1, 7, 3))],
    "route": [
        route_case(1, 8, 2),
        route_case(1, 40, 3),
        route_case(2, 8, 2),
        route_case(9, 8, 3),
        route_case(9, 8, 3, lower=5.0),
        route_case(1, 40, 3, lower=5.0),
        route_case(9, 12, 2, groups=4, top=2),
        route_case(1, 12, 2, groups=3, top=1),
        route_tie_case(1),
        route_tie_case(4),
    ],
    "experts": [
        experts_case(1, 5, 2, shared=1, limit=1.5),
        experts_case(1, 20, 3, shared=2, limit=None),
        experts_case(2, 5, 2, shared=1, limit=1.5),
        experts_case(3, 5, 2, shared=1, limit=1.5),
        experts_case(9, 5, 3, shared=2, limit=0.5),
        experts_case(9, 20, 3, shared=1, limit=0.5),
        experts_case(40, 5, 2, shared=2, limit=1.5),
        experts_case(40, 7, 1, shared=1, limit=None),
    ],
    "sample": [sample_case(1, 11, 11), sample_case(3, 40, 29)],
}
PACKERS = {  # packed weights are proved by the op that reads them
    "pack": "linear",
    "pack_heads": "head_linear",
    "pack_hyper": "hyper_in",
    "pack_experts": "experts",
}

"""class Ops(Protocol): every op, its shapes, dtypes, errors, source. THE SEAM.

Implementations: `ops/reference` (plain NumPy, the definition), `ops/exact` (the same with one order
for each sum of a row, `--deterministic on`) and `ops/cuda` (the fast twin).
Model code calls these and slices, reshapes and transposes views; it computes nothing itself.

Rules for all ops. Activations are float32 on the reference; results are new arrays unless a
parameter is said to be changed in place. Row geometry comes as a `Rows` record of arrays, so that
a captured step can read it from fixed addresses. Shapes that do not fit raise `ShapeMismatch`; a
failed device call leaves as `DeviceError`. Weights are packed once at load by the backend (the
`pack` methods); model code cannot tell how. "glm" below is the family's description: every formula
names its section there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device

Packed = Any  # a weight as this backend wants it; only ops look inside


class Segment(NamedTuple):
    """One sequence's part of a step, as host numbers."""

    first: int  # its first row in the step
    length: int  # its rows
    context: int  # its rows computed before this step
    slot: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows of a step belong to which sequence, and where their state lives; never changed.

    Shapes: starts (seqs + 1,) i32, rows of sequence s are [starts[s], starts[s+1])
            context (seqs,) i32, rows of the sequence computed before this step (L)
            slots (seqs,) i32, state slot
            table (seqs, pages) i32, page ids in order, padded with 0
    The first `decode` sequences have exactly one row each, so rows [0, decode) are theirs.
    `fresh` (seqs,) bool: the slot's state is to be read as zero.

    The cached properties are host views for the reference and for cursors; a captured step reads
    the arrays themselves.
    """

    starts: Array
    context: Array
    slots: Array
    table: Array
    fresh: Array
    decode: int
    page_tokens: int

    @property
    def sequences(self) -> int:
        return len(self.slots)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Each sequence in turn."""
        bounds = pairwise(self.starts.tolist())
        rest = zip(self.context.tolist(), self.slots.tolist(), strict=True)
        return tuple(
            Segment(first, end - first, context, slot)
            for (first, end), (context, slot) in zip(bounds, rest, strict=True)
        )

    @cached_property
    def fresh_slots(self) -> tuple[int, ...]:
        """Slots whose state starts at zero in this step."""
        return tuple(int(slot) for slot in self.slots[self.fresh])

    @cached_property
    def decode_slots(self) -> slice | Array:
        """Slots of the decode rows; a slice when they lie side by side: nothing is copied."""
        slots = [segment.slot for segment in self.segments[: self.decode]]
        first = slots[0] if slots else 0
        if slots == list(range(first, first + len(slots))):
            return slice(first, first + len(slots))
        return self.slots[: self.decode]

    @cached_property
    def owners(self) -> Array:
        """Which sequence each row belongs to. Shapes: (rows,) i64."""
        if self.decode == self.sequences:
            return np.arange(self.sequences)
        return np.repeat(np.arange(self.sequences), np.diff(self.starts))

    @cached_property
    def positions(self) -> Array:
        """Index of each row in its sequence. Shapes: (rows,) i64."""
        if self.decode == self.sequences:
            return self.context.astype(np.int64)
        shift = self.context.astype(np.int64) - self.starts[:-1]
        return np.arange(int(self.starts[-1])) + shift[self.owners]

    @cached_property
    def places(self) -> Array:
        """Where each row lies in pages seen as rows: page * page_tokens + offset. (rows,) i64."""
        page, offset = np.divmod(self.positions, self.page_tokens)
        return self.table[self.owners, page].astype(np.int64) * self.page_tokens + offset


class Ops(Protocol):
    """What a backend can do. Names are grouped as the files under `reference/`."""

    device: Device  # where it computes

    # -- weights ------------------------------------------------------------------------------

    def pack(
        self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None
    ) -> Packed:
        """A dense weight (outs, ins) and its bias (outs,) as `linear` wants them."""

    def pack_heads(self, weight: npt.NDArray[np.float32]) -> Packed:
        """Per-head weights (heads, ins, outs) as `head_linear` wants them."""

    def pack_experts(
        self,
        gate_up: npt.NDArray[np.float32],
        down: npt.NDArray[np.float32],
        shared_gate_up: npt.NDArray[np.float32],
        shared_down: npt.NDArray[np.float32],
    ) -> Packed:
        """Routed experts and the shared one, which sees every row, as `experts` wants them.

        Shapes: gate_up (experts, 2*inner, ins), gate rows first · down (experts, ins, inner)
                shared_gate_up (2*shared_inner, ins) · shared_down (ins, shared_inner)
        Raises: ShapeMismatch when shared_inner is not a multiple of inner
        """

    def pack_hyper(
        self,
        fn: npt.NDArray[np.float32],
        base: npt.NDArray[np.float32],
        scale: npt.NDArray[np.float32],
        norm: npt.NDArray[np.float32],
    ) -> Packed:
        """One hyper-connection site and the norm of the block behind it, as `hyper_in` wants them.

        Shapes, with n streams: fn (2n + n*n, n*hidden): pre, post, comb · base (2n + n*n,)
                scale (3,): pre, post, comb · norm (hidden,), weight of the block's input norm
        """

    # -- linear -------------------------------------------------------------------------------

    def take_rows(self, x: Array, ids: Array) -> Array:
        """Rows by number: an embedding, or the rows whose logits are wanted.

        Shapes: x (count, ...) · ids (rows,) i32 · result (rows, ...)
        """

    def linear(self, x: Array, w: Packed) -> Array:
        """x W^T + bias. Shapes: x (rows, ins) · result (rows, outs). Sums in f32."""

    def head_linear(self, x: Array, w: Packed) -> Array:
        """Each head by its own matrix: x (rows, heads, ins) -> (rows, heads, outs)."""

    # -- pointwise ----------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """w * x / sqrt(mean(x^2) + eps) over the last axis; no (1 + w) variant."""

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """LayerNorm over the last axis, biased variance."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y, same shapes."""

    def swiglu(self, gate_up: Array, limit: float | None) -> Array:
        """silu(min(gate, limit)) * clip(up, -limit, limit) (glm 7.1).

        Shapes: gate_up (rows, 2*inner), gate first · result (rows, inner). None: no clamp.
        """

    def gelu(self, x: Array) -> Array:
        """Exact GELU (erf)."""

    def hyper_expand(self, x: Array, streams: int) -> Array:
        """Copy each row into every stream.

        Shapes: (rows, hidden) -> (rows, streams + 1, hidden). In every array of streams the last
                row is room for a block's output; between blocks it means nothing.
        """

    def hyper_in(
        self, x: Array, w: Packed, *, norm_eps: float, eps: float, rounds: int
    ) -> tuple[Array, Array]:
        """The input side of one site, with the norm of the block behind it (glm 4, steps 1 to 8).

        Shapes: x (rows, n + 1, hidden) -> h (rows, hidden), the normed block input
                mix (rows, n, n + 1): row j is (comb[0][j], ..., comb[n-1][j], post[j])
        `norm_eps` belongs to both mean squares, `eps` to everything else. All `rounds` are run.
        """

    def hyper_out(self, x: Array, y: Array, mix: Array) -> Array:
        """New streams: out[j] = post[j] * y + sum_i comb[i][j] * x[i]: comb transposed (glm 4.9).

        Shapes: x (rows, n + 1, hidden), its last row overwritten · y (rows, hidden)
                mix (rows, n, n + 1) of `hyper_in` · result (rows, n + 1, hidden)
        """

    def hyper_mean(self, x: Array) -> Array:
        """Unweighted mean over streams: (rows, n + 1, hidden) -> (rows, hidden)."""

    def lay_rows(self, x: Array, rows: Array, spans: tuple[tuple[int, int, int], ...]) -> None:
        """Copy overlay rows over x in place (rules 25 to 27).

        Shapes: x (n, hidden) · rows (m, hidden) · spans of (row of x, row of rows, count)
        """

    def is_finite(self, x: Array) -> bool:
        """Whether every value is finite (rule 23); waits for the answer."""

    def rotate_half(self, x: Array, cos: Array, sin: Array) -> Array:
        """Half-split rotary: x*cos + [-x2, x1]*sin.

        Shapes: x (rows, heads, dim) · cos, sin (rows, dim)
        """

    # -- recurrent ----------------------------------------------------------------------------

    def short_conv(self, x: Array, kernel: Array, window: Array, rows: Rows) -> Array:
        """Causal depthwise convolution and SiLU, each sequence behind its own window (glm 5.1).

        Shapes: x (rows, channels) · kernel (taps, channels), last tap is the current token
                window (slots, taps - 1, channels) f32, raw inputs, oldest first, changed in place
        """

    def kda_gates(
        self, f: Array, b: Array, rate: Array, dt_bias: Array, lower_bound: float | None
    ) -> tuple[Array, Array]:
        """Log decay and write strength (glm 5.3).

        Shapes: f (rows, heads*dim) · b (rows, heads) · rate, dt_bias (heads*dim,), rate being
                exp(A_log) of each channel's head -> g (rows, heads, dim) · beta (rows, heads)
        Units:  g is the logarithm of the decay factor, negative:
                lower_bound * sigmoid(rate * (f + dt_bias)); without a bound
                -rate * softplus(f + dt_bias)
        """

    def kda(self, qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> Array:
        """The delta-rule memory, L2 norms of q and k included (glm 5.2, 5.4, 5.6).

        Shapes: qkv (rows, 3, heads, dim) after convolution · g (rows, heads, dim)
                beta (rows, heads) · result (rows, heads, dim)
                state (slots, heads, dim_k, dim_v) f32, changed in place
        """

    def kda_out(self, o: Array, gate: Array, weight: Array, eps: float) -> Array:
        """RMS norm of each head, times sigmoid(gate) (glm 5.5).

        Shapes: o (rows, heads, dim) · gate, result (rows, heads*dim) · weight (dim,)
        """

    # -- paged rows, indexer, attention ---------------------------------------------------------

    def write_rows(self, pages: Array, values: Array, rows: Rows) -> None:
        """Put each row at its position's place.

        Shapes: pages (pages, page_tokens, width), changed in place · values (rows, width)
        """

    def index_write(
        self, keys: Array, gates: Array, valid: Array, key: Array, gate: Array, rows: Rows
    ) -> None:
        """Put each row's indexer key and gate at its position's place and mark it valid (glm 6.2).

        Shapes: keys, gates (pages, page_tokens, dim) · valid (pages, page_tokens) u8, all three
                changed in place · key, gate (rows, dim)
        """

    def index_pool(
        self, pooled: Array, keys: Array, gates: Array, valid: Array, ape: Array, rows: Rows
    ) -> None:
        """Keys of the pools that this step's rows complete (R18), from rows already written.

        Shapes: pooled (pages, page_tokens / P, dim), changed in place · ape (P, dim)
                keys, gates, valid as in `index_write`
        An invalid row has no weight; a pool without a valid row is zero.
        """

    def index_select(
        self,
        q: Array,
        head_weights: Array,
        pooled: Array,
        rows: Rows,
        *,
        pool: int,
        top_tokens: int,
    ) -> Array | None:
        """Which tokens each row attends to (R19 to R23); None when every row sees all (all short).

        Shapes: q (rows, heads, dim) · head_weights (rows, heads), factor heads^-0.5 included
                pooled (pages, page_tokens / pool, dim)
                result (rows, top_tokens + pool - 1) i32 positions, -1 where there is none: tokens
                of the row's own pools in order, then its tail (R22)
        A pool's score is the sum over heads of weight * max(0, dim^-0.5 * q.k); of equal scores
        the lower pool wins (R20).
        """

    def latent_attention(
        self, q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
    ) -> Array:
        """Attend to latent rows up to the row's own position, or to selected ones (glm 6.1).

        Shapes: q (rows, heads, rank), absorbed · latents (pages, page_tokens, rank)
                selected (rows, width) i32 positions, those below 0 are skipped
                result (rows, heads, rank)
        """

    def segment_attention(
        self, q: Array, k: Array, v: Array, segments: tuple[int, ...], *, scale: float
    ) -> Array:
        """Full attention inside each run of rows (vision).

        Shapes: q, k, v, result (rows, heads, dim) · segments: row counts that add up to rows
        """

    # -- experts --------------------------------------------------------------------------------

    def route(
        self,
        logits: Array,
        bias: Array,
        *,
        active: int,
        scale: float,
        normalise: bool,
        groups: int,
        top_groups: int,
    ) -> tuple[Array, Array]:
        """Chosen experts and their weights (glm 7.2).

        Shapes: logits (rows, experts) · bias (experts,) -> ids (rows, active) i32, best first;
                weights (rows, active). Equal scores go to the lower id.
        """

    def experts(
        self, x: Array, chosen: Array, weights: Array, w: Packed, limit: float | None
    ) -> Array:
        """Sum over chosen experts of weight * expert(x), plus the shared expert (glm 7.2, step 6).

        Shapes: x, result (rows, hidden) · chosen (rows, active) i32 · weights (rows, active)
        """

    # -- sampling -------------------------------------------------------------------------------

    def sample(
        self,
        logits: Array,
        *,
        temperature: Array,
        top_p: Array,
        top_k: Array,
        min_p: Array,
        seeds: Array,
        counters: Array,
        banned: tuple[tuple[int, int], ...],
        usable: int,
    ) -> tuple[Array, Array]:
        """Draw one token a row; ids from `usable` on and banned (row, id) pairs are never drawn.

        Shapes: logits (rows, vocab), may be changed · temperature, top_p, min_p (rows,) f32
                top_k (rows,) i32, 0 is off · seeds (rows,) u64
                counters (rows, 2) u32: choice, position
                result: ids (rows,) i32, -1 where a row holds NaN or infinity (R86);
                logprobs (rows,) f32, of the unmodified distribution
        Units:  temperature below 1e-3 is greedy, ties to the lower id; a draw is a counter-based
                function of (seed, choice, position) only (O30)
        """

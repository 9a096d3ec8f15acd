"""class Ops(Protocol): every op, its shapes, dtypes, errors, source. THE SEAM.

Two implementations: `ops/reference` (plain NumPy, the definition) and `ops/cuda` (the fast twin).
Model code calls these and slices, reshapes and transposes views; it computes nothing itself.

Rules for all ops. Activations are float32 on the reference; results are new arrays unless a parameter
is said to be changed in place. Row geometry comes as a `Rows` record of arrays, so that a captured
step can read it from fixed addresses. Shapes that do not fit raise `ShapeMismatch`; a failed device
call leaves as `DeviceError`. Weights are packed once at load by the backend (`pack`, `pack_experts`);
model code cannot tell how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.device.device import Array

Packed = Any  # a weight as this backend wants it; only ops look inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Which rows of a step belong to which sequence, and where their state lives.

    Shapes: starts (seqs + 1,) i32, rows of sequence s are [starts[s], starts[s+1])
            context (seqs,) i32, rows of the sequence computed before this step (L)
            slots (seqs,) i32, state slot · table (seqs, pages) i32, page ids in order, padded with 0
    The first `decode` sequences have exactly one row each, so rows [0, decode) are theirs.
    `fresh` (seqs,) bool: the slot's state is to be read as zero.
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


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """One site of hyper-connections; fn (n*n + 2n, n*hidden), base (n*n + 2n,), scale (3,), f32."""

    fn: Packed
    base: Array
    scale: Array


class Ops(Protocol):
    """What a backend can do. Names are grouped as the files under `reference/`."""

    # -- weights ------------------------------------------------------------------------------

    def pack(self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> Packed:
        """A dense weight (outs, ins) and its bias (outs,) as `linear` wants them."""

    def pack_heads(self, weight: npt.NDArray[np.float32]) -> Packed:
        """Per-head weights (heads, ins, outs) as `head_linear` wants them."""

    def pack_experts(
        self, gate_up: npt.NDArray[np.float32], down: npt.NDArray[np.float32]
    ) -> Packed:
        """Expert weights: gate_up (experts, 2*inner, ins), gate rows first; down (experts, ins, inner)."""

    def pack_hyper(
        self,
        fn: npt.NDArray[np.float32],
        base: npt.NDArray[np.float32],
        scale: npt.NDArray[np.float32],
        streams: int,
    ) -> HyperWeights:
        """One hyper-connection site; fn (n*n + 2n, n*hidden)."""

    # -- linear -------------------------------------------------------------------------------

    def embed(self, table: Array, ids: Array) -> Array:
        """Rows of the table. Shapes: table (vocab, hidden) · ids (rows,) i32 · result (rows, hidden)."""

    def linear(self, x: Array, w: Packed) -> Array:
        """x W^T + bias. Shapes: x (rows, ins) · result (rows, outs). Sums in f32."""

    def head_linear(self, x: Array, w: Packed) -> Array:
        """Each head by its own matrix. Shapes: x (rows, heads, ins) · result (rows, heads, outs)."""

    # -- pointwise ----------------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """w * x / sqrt(mean(x^2) + eps) over the last axis; no (1 + w) variant."""

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        """LayerNorm over the last axis, biased variance."""

    def add(self, x: Array, y: Array) -> Array:
        """x + y, same shapes."""

    def swiglu(self, gate_up: Array, limit: float | None) -> Array:
        """silu(min(gate, limit)) * clip(up, -limit, limit).

        Shapes: gate_up (rows, 2*inner), gate first · result (rows, inner). None: no clamp.
        """

    def gelu(self, x: Array) -> Array:
        """Exact GELU (erf)."""

    def hyper_expand(self, x: Array, streams: int) -> Array:
        """Copy each row into every stream. Shapes: (rows, hidden) -> (rows, streams, hidden)."""

    def hyper_in(
        self, x: Array, w: HyperWeights, *, norm_eps: float, eps: float, rounds: int
    ) -> tuple[Array, Array, Array]:
        """The input side of one site (glm5_next.md section 4, steps 1 to 7).

        Shapes: x (rows, n, hidden) -> u (rows, hidden), post (rows, n), comb (rows, n, n)
        `norm_eps` belongs to the mean square of x, `eps` to everything else. All `rounds` are run.
        """

    def hyper_out(self, x: Array, y: Array, post: Array, comb: Array) -> Array:
        """New streams: out[j] = post[j] * y + sum_i comb[i][j] * x[i] (the transpose of comb mixes)."""

    def hyper_mean(self, x: Array) -> Array:
        """Unweighted mean over streams: (rows, n, hidden) -> (rows, hidden)."""

    def lay_rows(self, x: Array, rows: Array, spans: tuple[tuple[int, int, int], ...]) -> None:
        """Copy overlay rows over x in place: spans of (row of x, row of rows, count) (rules 25 to 27)."""

    def is_finite(self, x: Array) -> bool:
        """Whether every value is finite (rule 23); waits for the answer."""

    # -- recurrent ----------------------------------------------------------------------------

    def short_conv(self, x: Array, kernel: Array, window: Array, rows: Rows) -> Array:
        """Causal depthwise convolution and SiLU, for each sequence behind its own window.

        Shapes: x (rows, channels) · kernel (channels, taps), last tap is the current token
                window (slots, taps - 1, channels) f32, raw inputs, oldest first, changed in place
        """

    def kda_gates(
        self,
        f: Array,
        b: Array,
        a_log: Array,
        dt_bias: Array,
        lower_bound: float | None,
    ) -> tuple[Array, Array]:
        """Log decay and write strength (glm5_next.md 5.3).

        Shapes: f (rows, heads*dim), b (rows, heads) -> g (rows, heads, dim), beta (rows, heads)
        Units:  g is the logarithm of the decay factor, negative
        """

    def kda(
        self, qkv: Array, g: Array, beta: Array, state: Array, rows: Rows
    ) -> Array:
        """The delta-rule memory, L2 norms of q and k included (5.2, 5.4, 5.6).

        Shapes: qkv (rows, 3, heads, dim) after convolution · g (rows, heads, dim) · beta (rows, heads)
                state (slots, heads, dim_k, dim_v) f32, changed in place · result (rows, heads, dim)
        """

    def kda_out(self, o: Array, gate: Array, weight: Array, eps: float) -> Array:
        """RMS norm a head, times sigmoid(gate). Shapes: o, gate (rows, heads, dim) -> (rows, heads*dim)."""

    # -- paged rows, indexer, attention ---------------------------------------------------------

    def write_rows(self, pages: Array, values: Array, rows: Rows) -> None:
        """Put each row at its position's place: pages (pages, page_tokens, width), changed in place."""

    def index_pool(
        self, pooled: Array, keys: Array, gates: Array, ape: Array, rows: Rows
    ) -> None:
        """Pool keys of the pools that this step completed (R18), from rows already written.

        Shapes: pooled (pages, page_tokens / P, dim), changed in place · keys, gates (pages, page_tokens, dim)
                ape (P, dim)
        """

    def index_select(
        self, q: Array, head_weights: Array, pooled: Array, rows: Rows, *, pool: int, top_tokens: int
    ) -> Array | None:
        """Which tokens each row attends to (R19 to R23); None when every row sees all (all short).

        Shapes: q (rows, heads, dim) · head_weights (rows, heads), factor heads^-0.5 included
                result (rows, top_tokens + pool - 1) i32 positions, -1 where there is none
        """

    def latent_attention(
        self, q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
    ) -> Array:
        """Attend to latent rows, causally, or to the selected positions only.

        Shapes: q (rows, heads, rank), absorbed · latents (pages, page_tokens, rank)
                result (rows, heads, rank)
        """

    def segment_attention(
        self, q: Array, k: Array, v: Array, segments: tuple[int, ...], *, scale: float
    ) -> Array:
        """Full attention inside each run of rows (vision). Shapes: q, k, v (rows, heads, dim), segments add to rows."""

    def rotate_half(self, x: Array, cos: Array, sin: Array) -> Array:
        """Half-split rotary: x*cos + [-x2, x1]*sin. Shapes: x (rows, heads, dim) · cos, sin (rows, dim)."""

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
        """Chosen experts and their weights (glm5_next.md 7.2), each (rows, active); ids i32."""

    def experts(self, x: Array, chosen: Array, weights: Array, w: Packed, limit: float | None) -> Array:
        """Sum over chosen experts of weight * expert(x). Shapes: x (rows, hidden) -> (rows, hidden)."""

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
        """Draw one token a row. Ids at and above `usable` and banned (row, id) pairs are never drawn.

        Shapes: logits (rows, vocab), may be changed · temperature, top_p, min_p (rows,) f32
                top_k (rows,) i32, 0 is off · seeds (rows,) u64 · counters (rows, 2) u32: choice, position
                result: ids (rows,) i32, -1 where a row holds NaN or infinity (R86); logprobs (rows,) f32,
                of the unmodified distribution
        Units:  temperature below 1e-3 is greedy, ties to the lower id; a draw is a counter-based
                function of (seed, choice, position) only (O30)
        """

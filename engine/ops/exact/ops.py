"""ExactOps: the reference, with one order for each sum of a row whatever else a step holds (D9)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.ops.exact import attention, linear, moe, pointwise, recurrent
from engine.ops.reference.indexer import index_select
from engine.ops.reference.moe import route_rows
from engine.ops.reference.ops import ReferenceOps
from engine.ops.spec import Packed, Rows


class ExactOps(ReferenceOps):
    """What each op means is its entry in `Ops`; all that the reference does by rows stays there.

    Only those ops stand here whose reference form may round a row differently beside other rows.
    Bits are the same on one machine type, not across types: kernels of BLAS and of `exp` differ.
    """

    def pack(
        self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None
    ) -> Packed:
        return linear.pack(weight, bias)

    def pack_heads(self, weight: npt.NDArray[np.float32]) -> Packed:
        return linear.pack_heads(weight)

    def pack_experts(
        self,
        gate_up: npt.NDArray[np.float32],
        down: npt.NDArray[np.float32],
        shared_gate_up: npt.NDArray[np.float32],
        shared_down: npt.NDArray[np.float32],
    ) -> Packed:
        return moe.pack_experts(gate_up, down, shared_gate_up, shared_down)

    def pack_hyper(
        self,
        fn: npt.NDArray[np.float32],
        base: npt.NDArray[np.float32],
        scale: npt.NDArray[np.float32],
        norm: npt.NDArray[np.float32],
    ) -> Packed:
        return pointwise.pack_hyper(fn, base, scale, norm)

    def linear(self, x: Array, w: Packed) -> Array:
        return self._launch("linear", linear.linear, x, w)

    def head_linear(self, x: Array, w: Packed) -> Array:
        return self._launch("head_linear", linear.head_linear, x, w)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self._launch("rms_norm", pointwise.rms_norm, x, weight, eps)

    def hyper_in(
        self, x: Array, w: Packed, *, norm_eps: float, eps: float, rounds: int
    ) -> tuple[Array, Array]:
        return self._launch(
            "hyper_in", pointwise.hyper_in, x, w, norm_eps=norm_eps, eps=eps, rounds=rounds
        )

    def kda(self, qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> Array:
        return self._launch("kda", recurrent.kda, qkv, g, beta, state, rows)

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
        return self._launch(
            "index_select",
            index_select,
            q,
            head_weights,
            pooled,
            rows,
            pool=pool,
            top_tokens=top_tokens,
            score=attention.pool_scores,
        )

    def latent_attention(
        self, q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
    ) -> Array:
        return self._launch(
            "latent_attention", attention.latent_attention, q, latents, selected, rows, scale=scale
        )

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
        return self._launch(
            "route",
            route_rows,
            logits,
            bias,
            active=active,
            scale=scale,
            normalise=normalise,
            groups=groups,
            top_groups=top_groups,
        )

    def experts(
        self, x: Array, chosen: Array, weights: Array, w: Packed, limit: float | None
    ) -> Array:
        return self._launch("experts", moe.experts, x, chosen, weights, w, limit)

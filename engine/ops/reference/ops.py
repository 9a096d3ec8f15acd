"""ReferenceOps: the NumPy functions below, gathered as an Ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device
from engine.ops.reference import (
    attention,
    indexer,
    linear,
    moe,
    pointwise,
    recurrent,
    sampling,
)
from engine.ops.spec import Packed, Rows


class ReferenceOps:
    """The definition: what each op means is its entry in `Ops`; here each goes to its device.

    Packing happens once, on the host, before anything runs; it is no device work.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._launch = device.launch

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

    def take_rows(self, x: Array, ids: Array) -> Array:
        return self._launch("take_rows", linear.take_rows, x, ids)

    def linear(self, x: Array, w: Packed) -> Array:
        return self._launch("linear", linear.linear, x, w)

    def head_linear(self, x: Array, w: Packed) -> Array:
        return self._launch("head_linear", linear.head_linear, x, w)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return self._launch("rms_norm", pointwise.rms_norm, x, weight, eps)

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> Array:
        return self._launch("layer_norm", pointwise.layer_norm, x, weight, bias, eps)

    def add(self, x: Array, y: Array) -> Array:
        return self._launch("add", pointwise.add, x, y)

    def swiglu(self, gate_up: Array, limit: float | None) -> Array:
        return self._launch("swiglu", pointwise.swiglu, gate_up, limit)

    def gelu(self, x: Array) -> Array:
        return self._launch("gelu", pointwise.gelu, x)

    def hyper_expand(self, x: Array, streams: int) -> Array:
        return self._launch("hyper_expand", pointwise.hyper_expand, x, streams)

    def hyper_in(
        self, x: Array, w: Packed, *, norm_eps: float, eps: float, rounds: int
    ) -> tuple[Array, Array]:
        return self._launch(
            "hyper_in", pointwise.hyper_in, x, w, norm_eps=norm_eps, eps=eps, rounds=rounds
        )

    def hyper_out(self, x: Array, y: Array, mix: Array) -> Array:
        return self._launch("hyper_out", pointwise.hyper_out, x, y, mix)

    def hyper_mean(self, x: Array) -> Array:
        return self._launch("hyper_mean", pointwise.hyper_mean, x)

    def lay_rows(self, x: Array, rows: Array, spans: tuple[tuple[int, int, int], ...]) -> None:
        self._launch("lay_rows", pointwise.lay_rows, x, rows, spans)

    def is_finite(self, x: Array) -> bool:
        return self._launch("is_finite", pointwise.is_finite, x)

    def rotate_half(self, x: Array, cos: Array, sin: Array) -> Array:
        return self._launch("rotate_half", pointwise.rotate_half, x, cos, sin)

    def short_conv(self, x: Array, kernel: Array, window: Array, rows: Rows) -> Array:
        return self._launch("short_conv", recurrent.short_conv, x, kernel, window, rows)

    def kda_gates(
        self, f: Array, b: Array, rate: Array, dt_bias: Array, lower_bound: float | None
    ) -> tuple[Array, Array]:
        return self._launch("kda_gates", recurrent.kda_gates, f, b, rate, dt_bias, lower_bound)

    def kda(self, qkv: Array, g: Array, beta: Array, state: Array, rows: Rows) -> Array:
        return self._launch("kda", recurrent.kda, qkv, g, beta, state, rows)

    def kda_out(self, o: Array, gate: Array, weight: Array, eps: float) -> Array:
        return self._launch("kda_out", recurrent.kda_out, o, gate, weight, eps)

    def write_rows(self, pages: Array, values: Array, rows: Rows) -> None:
        self._launch("write_rows", attention.write_rows, pages, values, rows)

    def index_write(
        self, keys: Array, gates: Array, valid: Array, key: Array, gate: Array, rows: Rows
    ) -> None:
        self._launch("index_write", indexer.index_write, keys, gates, valid, key, gate, rows)

    def index_pool(
        self, pooled: Array, keys: Array, gates: Array, valid: Array, ape: Array, rows: Rows
    ) -> None:
        self._launch("index_pool", indexer.index_pool, pooled, keys, gates, valid, ape, rows)

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
            indexer.index_select,
            q,
            head_weights,
            pooled,
            rows,
            pool=pool,
            top_tokens=top_tokens,
        )

    def latent_attention(
        self, q: Array, latents: Array, selected: Array | None, rows: Rows, *, scale: float
    ) -> Array:
        return self._launch(
            "latent_attention", attention.latent_attention, q, latents, selected, rows, scale=scale
        )

    def segment_attention(
        self, q: Array, k: Array, v: Array, segments: tuple[int, ...], *, scale: float
    ) -> Array:
        return self._launch(
            "segment_attention", attention.segment_attention, q, k, v, segments, scale=scale
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
            moe.route,
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
        return self._launch(
            "sample",
            sampling.sample,
            logits,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seeds=seeds,
            counters=counters,
            banned=banned,
            usable=usable,
        )

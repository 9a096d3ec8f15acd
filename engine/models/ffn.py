"""dense and expert FFN."""

from __future__ import annotations

from dataclasses import dataclass

from engine.device.device import Array
from engine.ops.spec import Ops, Packed
from engine.spec import Dense, Ffn, Moe


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """gate_up: gate rows, then up rows, (2*inner, hidden) · down (hidden, inner)."""

    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router (experts, hidden) · bias (experts,) for the choice only · experts, shared included."""

    router: Packed
    bias: Array
    experts: Packed


FfnWeights = DenseWeights | MoeWeights


def feed_forward(h: Array, w: FfnWeights, spec: Ffn, ops: Ops) -> Array:
    """The feed-forward part of a layer. Shapes: h, result (rows, hidden)."""
    match spec, w:
        case Dense(), DenseWeights():
            return ops.linear(ops.swiglu(ops.linear(h, w.gate_up), spec.limit), w.down)
        case Moe(), MoeWeights():
            chosen, weights = ops.route(
                ops.linear(h, w.router),
                w.bias,
                active=spec.active,
                scale=spec.scale,
                normalise=spec.normalise,
                groups=spec.groups,
                top_groups=spec.top_groups,
            )
            return ops.experts(h, chosen, weights, w.experts, spec.limit)
    raise AssertionError(f"{type(w).__name__} are no weights of {type(spec).__name__}.")

"""the recurrent mixer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.recurrent import RecurrentSlots
from engine.device.device import Array
from engine.ops.spec import Ops, Packed, Rows
from engine.spec import Kda


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """Weights of one layer; r is the rank of both gates.

    Shapes: inputs: q | k | v | decay gate in | output gate in | beta,
                    (3*inner + 2*r + heads, hidden)
            gates: (2, r, inner), from the low rank to the decay and to the output gate
            kernel (taps, 3*inner) · rate, dt_bias (inner,) · norm (dim,) · out (hidden, inner)
    """

    inputs: Packed
    gates: Packed
    kernel: Array
    rate: Array
    dt_bias: Array
    norm: Array
    out: Packed
    rank: int


def mix(
    h: Array, rows: Rows, w: KdaWeights, state: RecurrentSlots, spec: Kda, eps: float, ops: Ops
) -> Array:
    """Kimi delta attention (glm5_next.md 5). Shapes: h, result (rows, hidden)."""
    count, inner = len(h), spec.inner
    projected = ops.linear(h, w.inputs)
    low, end = 3 * inner, 3 * inner + 2 * w.rank
    gates = ops.head_linear(projected[:, low:end].reshape(count, 2, w.rank), w.gates)
    qkv = ops.short_conv(projected[:, :low], w.kernel, state.window, rows)
    g, beta = ops.kda_gates(gates[:, 0], projected[:, end:], w.rate, w.dt_bias, spec.lower_bound)
    qkv = qkv.reshape(count, 3, spec.heads, spec.dim)
    o = ops.kda(qkv, g, beta, state.memory, rows)
    return ops.linear(ops.kda_out(o, gates[:, 1], w.norm, eps), w.out)

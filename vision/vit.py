"""The tower's small shared functions: patch embed, block, merge; and what a tower is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.device.device import Array
from engine.ops.spec import Ops, Packed

LAYER_NORM_EPS = 1e-5


class Tower(Protocol):
    """Patches of one picture -> rows of the trunk's width."""

    width: int  # of a row

    def rows(self, pixels: Array, grid: tuple[int, int, int]) -> Array:
        """Look at one picture, or one frame after another.

        Shapes: pixels (patches, channels * patch * patch) f32, normalised, in merge-block order
                result (patches / merge^2, width)
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """One transformer block; norms (hidden,), q_norm and k_norm (head,)."""

    norm1: Array
    qkv: Packed
    q_norm: Array
    k_norm: Array
    proj: Packed
    norm2: Array
    gate_up: Packed
    down: Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class MergerWeights:
    """From merged patches to rows of the trunk's width."""

    proj: Packed
    norm: Array
    norm_bias: Array
    gate_up: Packed
    down: Packed


class Rotary(NamedTuple):
    """Angles of each patch; both (patches, head) f32."""

    cos: Array
    sin: Array


def fold_frames(kernel: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A patch kernel for pictures: both temporal halves see the same frame, so they are summed.

    Shapes: kernel (hidden, channels, temporal, py, px) -> (hidden, channels * py * px)
    """
    summed: npt.NDArray[np.float32] = kernel.sum(axis=2, dtype=np.float64).astype(np.float32)
    return summed.reshape(len(summed), -1)


def fold_merge(kernel: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A strided convolution as one matrix over the patches of a merge block.

    Shapes: kernel (out, hidden, merge, merge) -> (out, merge * merge * hidden)
    """
    return np.ascontiguousarray(kernel.transpose(0, 2, 3, 1)).reshape(len(kernel), -1)


def block(
    x: Array,
    w: BlockWeights,
    rotary: Rotary,
    segments: tuple[int, ...],
    *,
    heads: int,
    eps: float,
    block_eps: float,
    limit: float | None,
    ops: Ops,
) -> Array:
    """Attention inside each segment, then the gated MLP, both pre-norm (glm5_next.md section 9).

    Shapes: x, result (patches, hidden) · segments add to patches
    """
    patches, hidden = x.shape
    head = hidden // heads
    qkv = ops.linear(ops.rms_norm(x, w.norm1, block_eps), w.qkv).reshape(patches, 3, heads, head)
    q = ops.rotate_half(ops.rms_norm(qkv[:, 0], w.q_norm, eps), *rotary)
    k = ops.rotate_half(ops.rms_norm(qkv[:, 1], w.k_norm, eps), *rotary)
    seen = ops.segment_attention(q, k, qkv[:, 2], segments, scale=head**-0.5)
    x = ops.add(x, ops.linear(seen.reshape(patches, hidden), w.proj))
    gate_up = ops.linear(ops.rms_norm(x, w.norm2, block_eps), w.gate_up)
    return ops.add(x, ops.linear(ops.swiglu(gate_up, limit), w.down))


def downsample(x: Array, kernel: Packed, block_patches: int, ops: Ops) -> Array:
    """Each merge block becomes one row. Shapes: x (patches, hidden) -> (patches / block, out)."""
    return ops.linear(x.reshape(len(x) // block_patches, -1), kernel)


def merge(x: Array, w: MergerWeights, limit: float | None, ops: Ops) -> Array:
    """Project, normalise, gate. Shapes: x, result (rows, width)."""
    u = ops.layer_norm(ops.linear(x, w.proj), w.norm, w.norm_bias, LAYER_NORM_EPS)
    return ops.linear(ops.swiglu(ops.linear(ops.gelu(u), w.gate_up), limit), w.down)

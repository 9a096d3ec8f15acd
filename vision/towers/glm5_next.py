"""GLM-5-Next: spec, weight names and forward of its tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device
from engine.errors import ModelError
from engine.ops.spec import Ops, Packed
from engine.weights.source import TensorSource
from vision.positions import rotary_tables
from vision.vit import (
    BlockWeights,
    MergerWeights,
    Rotary,
    block,
    downsample,
    fold_frames,
    fold_merge,
    merge,
)

PREFIX = "model.visual."


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """The tower as data, read from `vision_config`. Units: patch in pixels, merge in patches."""

    depth: int
    hidden: int
    heads: int
    inner: int
    channels: int
    patch: int
    temporal: int
    merge: int
    width: int  # of a row: the trunk's hidden size
    merger_inner: int
    eps: float
    block_eps: float  # of norm1 and norm2; the same number in all known checkpoints (T27)
    limit: float | None
    theta: float = 10_000.0

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def read_spec(config: Mapping[str, Any]) -> TowerSpec:
    """The tower of a checkpoint's config.json. Raises `ModelError` naming the field."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelError("config.json has no vision_config, but the checkpoint has vision tensors.")
    try:
        spec = TowerSpec(
            depth=int(vision["depth"]),
            hidden=int(vision["hidden_size"]),
            heads=int(vision["num_heads"]),
            inner=int(vision["intermediate_size"]),
            channels=int(vision["in_channels"]),
            patch=int(vision["patch_size"]),
            temporal=int(vision["temporal_patch_size"]),
            merge=int(vision["spatial_merge_size"]),
            width=int(vision["out_hidden_size"]),
            merger_inner=int(vision["projection_intermediate_size"]),
            eps=float(vision["rms_norm_eps"]),
            block_eps=float(vision["rms_norm_eps"]),
            limit=vision["swiglu_limit"],
        )
    except (KeyError, TypeError, ValueError) as bad:
        raise ModelError(f"config.json: vision_config is missing or misstates {bad}.") from bad
    if spec.channels != 3:
        raise ModelError(f"config.json: vision_config.in_channels is {spec.channels}; use 3 (RGB).")
    if spec.hidden % spec.heads or spec.head % 4:
        raise ModelError(
            f"config.json: vision_config.hidden_size {spec.hidden} over {spec.heads} heads; "
            "a head's width must be a multiple of 4."
        )
    for field, known in (("hidden_act", "silu"), ("attention_bias", True)):
        if vision.get(field, known) != known:
            raise ModelError(f"config.json: vision_config.{field} must be {known!r}.")
    return spec


def tensor_shapes(spec: TowerSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the tower by its released name, without the prefix."""
    h, inner, width, deep = spec.hidden, spec.inner, spec.width, spec.merger_inner
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (h, spec.channels, spec.temporal, spec.patch, spec.patch),
        "patch_embed.proj.bias": (h,),
        "post_layernorm.weight": (h,),
        "downsample.weight": (width, h, spec.merge, spec.merge),
        "downsample.bias": (width,),
        "merger.proj.weight": (width, width),
        "merger.post_projection_norm.weight": (width,),
        "merger.post_projection_norm.bias": (width,),
        "merger.gate_proj.weight": (deep, width),
        "merger.up_proj.weight": (deep, width),
        "merger.down_proj.weight": (width, deep),
    }
    for b in range(spec.depth):
        shapes |= {
            f"blocks.{b}.norm1.weight": (h,),
            f"blocks.{b}.norm2.weight": (h,),
            f"blocks.{b}.attn.qkv.weight": (3 * h, h),
            f"blocks.{b}.attn.qkv.bias": (3 * h,),
            f"blocks.{b}.attn.q_norm.weight": (spec.head,),
            f"blocks.{b}.attn.k_norm.weight": (spec.head,),
            f"blocks.{b}.attn.proj.weight": (h, h),
            f"blocks.{b}.attn.proj.bias": (h,),
            f"blocks.{b}.mlp.gate_proj.weight": (inner, h),
            f"blocks.{b}.mlp.gate_proj.bias": (inner,),
            f"blocks.{b}.mlp.up_proj.weight": (inner, h),
            f"blocks.{b}.mlp.up_proj.bias": (inner,),
            f"blocks.{b}.mlp.down_proj.weight": (h, inner),
            f"blocks.{b}.mlp.down_proj.bias": (h,),
        }
    return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWeights:
    """Everything the forward pass reads, packed."""

    patch_embed: Packed
    blocks: tuple[BlockWeights, ...]
    post_norm: Array
    downsample: Packed
    merger: MergerWeights


def load_weights(source: TensorSource, spec: TowerSpec, ops: Ops, device: Device) -> TowerWeights:
    """Read and pack the tower. The caller has checked that every tensor is there, in shape."""

    def read(name: str) -> npt.NDArray[np.float32]:
        return source.read(PREFIX + name)

    def norm(name: str) -> Array:
        return device.upload(read(f"{name}.weight"))

    def dense(name: str) -> Packed:
        return ops.pack(read(f"{name}.weight"), read(f"{name}.bias"))

    def gate_and_up(name: str, part: str) -> npt.NDArray[np.float32]:
        return np.concatenate([read(f"{name}.gate_proj.{part}"), read(f"{name}.up_proj.{part}")])

    blocks = tuple(
        BlockWeights(
            norm1=norm(f"blocks.{b}.norm1"),
            qkv=dense(f"blocks.{b}.attn.qkv"),
            q_norm=norm(f"blocks.{b}.attn.q_norm"),
            k_norm=norm(f"blocks.{b}.attn.k_norm"),
            proj=dense(f"blocks.{b}.attn.proj"),
            norm2=norm(f"blocks.{b}.norm2"),
            gate_up=ops.pack(
                gate_and_up(f"blocks.{b}.mlp", "weight"), gate_and_up(f"blocks.{b}.mlp", "bias")
            ),
            down=dense(f"blocks.{b}.mlp.down_proj"),
        )
        for b in range(spec.depth)
    )
    return TowerWeights(
        patch_embed=ops.pack(
            fold_frames(read("patch_embed.proj.weight")), read("patch_embed.proj.bias")
        ),
        blocks=blocks,
        post_norm=norm("post_layernorm"),
        downsample=ops.pack(fold_merge(read("downsample.weight")), read("downsample.bias")),
        merger=MergerWeights(
            proj=ops.pack(read("merger.proj.weight")),
            norm=norm("merger.post_projection_norm"),
            norm_bias=device.upload(read("merger.post_projection_norm.bias")),
            gate_up=ops.pack(gate_and_up("merger", "weight")),
            down=ops.pack(read("merger.down_proj.weight")),
        ),
    )


class Glm5NextTower:
    """Full attention inside each picture, two-dimensional rotary, 2 x 2 patches a row."""

    def __init__(self, spec: TowerSpec, weights: TowerWeights, ops: Ops, device: Device) -> None:
        self.spec = spec
        self.width = spec.width
        self._w = weights
        self._ops = ops
        self._device = device

    def rows(self, pixels: Array, grid: tuple[int, int, int]) -> Array:
        """Shapes: pixels (patches, 3 * patch * patch) f32 -> (patches / merge^2, width)."""
        spec, w, ops = self.spec, self._w, self._ops
        frames, tall, wide = grid
        x = ops.linear(pixels, w.patch_embed)
        rotary = self._rotary(frames, tall, wide)
        for layer in w.blocks:
            x = block(
                x,
                layer,
                rotary,
                (tall * wide,) * frames,
                heads=spec.heads,
                eps=spec.eps,
                block_eps=spec.block_eps,
                limit=spec.limit,
                ops=ops,
            )
        x = ops.rms_norm(x, w.post_norm, spec.eps)
        return merge(downsample(x, w.downsample, spec.merge**2, ops), w.merger, spec.limit, ops)

    def _rotary(self, frames: int, tall: int, wide: int) -> Rotary:
        cos, sin = rotary_tables(tall, wide, self.spec.merge, self.spec.head, self.spec.theta)
        if frames > 1:
            cos, sin = np.tile(cos, (frames, 1)), np.tile(sin, (frames, 1))
        return Rotary(self._device.upload(cos), self._device.upload(sin))

"""bind names to a weight tree and place it on stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.device.device import Array, Device
from engine.errors import ModelError
from engine.ops.spec import Ops, Packed
from engine.weights.source import TensorSource

HostArray = npt.NDArray[np.float32]


class Binder:
    """Reads tensors by name, holds each to the shape that the config asks for, and places it.

    What a family binds through one of these lives where `ops` computes.

    Args:
        source: the checkpoint's tensors.
        ops: packs matrices for its device.
    """

    def __init__(self, source: TensorSource, ops: Ops) -> None:
        self.source = source
        self._ops = ops
        self._device: Device = ops.device

    def host(self, name: str, *shape: int) -> HostArray:
        """A tensor on the host.

        Raises: ModelError naming the tensor and both shapes when they differ, or when it is absent.
        """
        found = self.source.shape(name)
        if found != shape:
            raise ModelError(
                f"tensor {name} has shape {found}, but config.json asks for {shape}. "
                "Use the config.json that belongs to these weights."
            )
        return self.source.read(name)

    def stacked(self, names: Sequence[str], shape: tuple[int, ...]) -> HostArray:
        """Equal tensors behind each other along a new first axis."""
        out = np.empty((len(names), *shape), np.float32)
        for place, name in enumerate(names):
            out[place] = self.host(name, *shape)
        return out

    def joined(self, parts: Sequence[tuple[str, int]], columns: int) -> HostArray:
        """Matrices (rows, columns) below each other. Parts are (name, rows)."""
        return np.concatenate([self.host(name, rows, columns) for name, rows in parts])

    def vector(self, name: str, *shape: int) -> Array:
        """A tensor on the device as it is: norm weights, biases, embeddings."""
        return self.place(self.host(name, *shape))

    def place(self, array: HostArray) -> Array:
        """A host array on the device."""
        return self._device.upload(np.ascontiguousarray(array, np.float32))

    def dense(self, name: str, outs: int, ins: int) -> Packed:
        """A matrix (outs, ins), packed."""
        return self._ops.pack(self.host(name, outs, ins))

    def fused(self, parts: Sequence[tuple[str, int]], ins: int) -> Packed:
        """Several matrices that read the same rows, as one. Parts are (name, outs)."""
        return self._ops.pack(self.joined(parts, ins))

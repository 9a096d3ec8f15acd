"""KDA and convolution state, in slots, and snapshots of it."""

from __future__ import annotations

import numpy as np

from engine.cache.paged import allocate_all, free_all
from engine.device.device import Device
from engine.spec import Kda


class RecurrentSlots:
    """The state of one recurrent layer, one slot a sequence; a fresh sequence reads it as zero.

    A snapshot is a slot behind the others that no step works on: the state as it was behind some
    row, copied there and back on the device.

    Shapes: memory (slots + snapshots, heads, dim, dim) f32, keys along the third axis
            window (slots + snapshots, taps - 1, 3 * inner) f32, raw projections q|k|v, oldest first
    """

    def __init__(self, device: Device, kda: Kda, *, slots: int, snapshots: int = 0) -> None:
        self.memory, self.window = allocate_all(
            device,
            [
                ((slots + snapshots, kda.heads, kda.dim, kda.dim), np.float32),
                ((slots + snapshots, kda.taps - 1, 3 * kda.inner), np.float32),
            ],
        )
        self._slots = slots
        self._device = device

    def load(self, slot: int, snapshot: int) -> None:
        """Put a snapshot into a slot."""
        self._device.launch("load recurrent state", self._copy, self._slots + snapshot, slot)

    def save(self, slot: int, snapshot: int) -> None:
        """Keep what a slot holds as a snapshot."""
        self._device.launch("save recurrent state", self._copy, slot, self._slots + snapshot)

    def _copy(self, source: int, target: int) -> None:
        self.memory[target] = self.memory[source]
        self.window[target] = self.window[source]

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        free_all(self._device, (self.memory, self.window))

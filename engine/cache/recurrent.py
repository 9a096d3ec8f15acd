"""KDA and convolution state, in slots."""

from __future__ import annotations

import numpy as np

from engine.cache.paged import allocate_all, free_all
from engine.device.device import Device
from engine.spec import Kda


class RecurrentSlots:
    """The state of one recurrent layer, one slot a sequence; a fresh sequence reads it as zero.

    Shapes: memory (slots, heads, dim, dim) f32, keys along the third axis
            window (slots, taps - 1, 3 * inner) f32, raw projections q|k|v, oldest first
    """

    def __init__(self, device: Device, kda: Kda, *, slots: int) -> None:
        self.memory, self.window = allocate_all(
            device,
            [
                ((slots, kda.heads, kda.dim, kda.dim), np.float32),
                ((slots, kda.taps - 1, 3 * kda.inner), np.float32),
            ],
        )
        self._device = device

    def free(self) -> None:
        """Give the memory back; a second call does nothing."""
        free_all(self._device, (self.memory, self.window))
